#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/transfer/context.h"
#include "server/transfer/fair_semaphore.h"
#include "server/transfer/source_stream.h"

namespace weightwire::transfer {

/// One source job, from StartSource until nothing touches its memory any more. Strand-only.
class SourceRun : public std::enable_shared_from_this<SourceRun> {
 public:
  /// `forget` runs once, last, when the job is over and quiet.
  SourceRun(std::shared_ptr<Context> context, SourceJob job, Engine::SourceDone done,
            std::function<void()> forget);

  void Start();
  void OnOpen(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& open);
  void OnCredit(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& credit);
  void OnClose(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& close);
  void OnSessionLost(uint64_t endpoint, const Status& why);
  /// As Engine::Exclude.
  void Exclude(const PlanId& plan, const std::vector<ParticipantId>& readers);
  /// `drained` runs after `forget`.
  void Drain(std::function<void()> drained);
  Engine::Progress progress() const;

  // For its streams.
  Context& context() const { return *context_; }
  const SourceJob& job() const { return job_; }
  struct MappedKeys {
    transport::RegionKey binding;
    transport::RegionKey sums;
  };
  /// Every tensor is of a memory that `transport` can map.
  bool CanBeMapped(const transport::Transport& transport) const;
  /// What readers that map over `transport` need; exported on first use.
  Result<MappedKeys> ExportForMapping(transport::Transport* transport);
  /// For the sums of all the job's segments, where slots have no host memory for them: readers that
  /// map find them there, and slots in a GPU's memory begin with a piece of it. Made once.
  Status MakeSumsRegion();
  /// Null until it was made.
  const std::shared_ptr<memory::MemoryRegion>& sums_region() const { return sums_region_; }
  /// Slots that may be announced together, of streams whose slots hold bytes and of others.
  FairSemaphore& slots() { return slots_; }
  FairSemaphore& mapped_slots() { return mapped_slots_; }
  /// Of all the job's streams.
  int64_t bytes_total() const { return bytes_total_; }
  /// Something may have finished or become quiet.
  void Changed();

 private:
  Status CheckLeg(const SourceAssignment& assignment) const;
  /// Forgets heads and sums of other plans.
  void FollowPlans();
  void OnReceived(uint32_t stream);
  void OnPlanned(std::vector<plan::StreamSchedule> schedules);
  SourceStream* FindStream(const StreamKey& key);
  void Finish(Result<SourceReport> result);
  void FinishFromStreams();
  /// Somebody else says what the loss of a reader means for the job, and has not said it yet.
  bool AwaitsWord();
  bool Quiet() const;
  void RevokeExports();
  void ArmProgressTimer();
  void CheckProgress();
  void ArmStallTimer();
  void ArmWaitingTimer();
  Status CheckReader(const transport::Endpoint& endpoint, const Notify& open,
                     const SourceStream& stream) const;

  std::shared_ptr<Context> context_;
  SourceJob job_;
  Engine::SourceDone done_;
  std::function<void()> forget_;
  std::vector<std::unique_ptr<SourceStream>> streams_;
  std::map<std::pair<uint64_t, uint32_t>, SourceStream*> by_key_;  ///< (plan_low, stream)
  FairSemaphore slots_;
  FairSemaphore mapped_slots_;
  int64_t bytes_total_ = 0;
  bool planned_ = false;
  std::vector<std::pair<std::shared_ptr<transport::Endpoint>, Notify>> early_opens_;
  uint64_t sums_bytes_ = 0;
  std::shared_ptr<memory::MemoryRegion> sums_region_;
  std::map<transport::Transport*, MappedKeys> exports_;
  bool finished_ = false;
  std::optional<Status> stop_reason_;
  bool revoking_ = false;
  size_t revokes_left_ = 0;
  bool forgotten_ = false;
  std::vector<std::function<void()>> drained_;
  Executor::TimerId progress_timer_ = 0;
  Executor::TimerId stall_timer_ = 0;
  Executor::TimerId waiting_timer_ = 0;
  Executor::TimerId grace_timer_ = 0;
  Executor::TimerId word_timer_ = 0;
  bool word_overdue_ = false;
};

}  // namespace weightwire::transfer
