#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/transfer/context.h"
#include "server/transfer/fair_semaphore.h"
#include "server/transfer/sessions.h"
#include "server/transfer/target_stream.h"

namespace weightwire::transfer {

/// One target job, from StartTarget until nothing writes its memory any more. Strand-only.
class TargetRun : public std::enable_shared_from_this<TargetRun> {
 public:
  /// `forget` runs once, last, when the job is over and quiet.
  TargetRun(std::shared_ptr<Context> context, std::shared_ptr<SessionTable> sessions, TargetJob job,
            Engine::TargetDone done, std::function<void()> forget);

  void Start();
  /// BINDING, READY, WAITING or FAIL.
  void OnNotify(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& notify);
  void OnSessionLost(uint64_t endpoint, const Status& why);
  /// `drained` runs after `forget`.
  void Drain(std::function<void()> drained);
  Engine::Progress progress() const;

  // For its streams.
  Context& context() const { return *context_; }
  const TargetJob& job() const { return job_; }
  /// Gets that may be under way together, from peers on our host and from others (flow_control.h).
  FairSemaphore& gets(bool same_host) { return same_host ? near_gets_ : gets_; }
  /// The stream's transport is of no use with its peer: see Options::avoid_after_failure.
  void Avoid(const TargetStream& stream);
  /// Ends the job and stops every stream. The first failure is the one that is reported.
  void FailJob(Status why);
  /// Of all the job's streams.
  int64_t bytes_total() const { return bytes_total_; }
  /// An attempt at this version may have left bytes here.
  bool resumes() const { return resumes_; }
  /// Something may have finished or become quiet.
  void Changed();

 private:
  Status Prepare();
  Status AddStream(const plan::Stream& stream);
  void ConnectAll();
  void OnPlanned(std::vector<plan::StreamSchedule> schedules);
  void OnConnected(TargetStream* stream, Result<std::shared_ptr<transport::Endpoint>> result);
  void OnFail(const TargetStream& stream, const Notify& fail);
  void Finish(Result<TargetReport> result);
  void FinishFromStreams();
  /// Codes and scales of what was gathered, when all streams are there; then FinishFromStreams.
  void MakeGathered();
  void MakeSlot(uint32_t slot);
  void OnMade(const Status& status);
  std::vector<WorkSpan> Spans() const;
  void ArmProgressTimer();
  void CheckProgress();

  std::shared_ptr<Context> context_;
  std::shared_ptr<SessionTable> sessions_;
  TargetJob job_;
  Engine::TargetDone done_;
  std::function<void()> forget_;
  std::vector<std::unique_ptr<TargetStream>> streams_;
  std::map<uint32_t, TargetStream*> by_id_;
  int64_t bytes_total_ = 0;
  bool resumes_ = false;
  FairSemaphore gets_;
  FairSemaphore near_gets_;
  plan::Stream made_;  ///< the copies within the rank
  plan::StreamSchedule made_schedule_;
  uint32_t made_slots_ = 0;  ///< done, and under way:
  uint32_t making_ = 0;
  TimeRange quantizing_;
  std::atomic<bool> stop_ = false;
  Nanos started_{0};
  bool finished_ = false;
  bool forgotten_ = false;
  std::vector<std::function<void()>> drained_;
  Executor::TimerId progress_timer_ = 0;
  Executor::TimerId grace_timer_ = 0;
};

}  // namespace weightwire::transfer
