#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/thread_executor.h"
#include "server/control/control.h"

namespace weightwire::load {

/// An agent with all ranks of one group that says everything a real one says and moves no byte:
/// what an epoch takes then is the coordinator's own time and the messages'. Every method runs on
/// `strand`, which outlives it.
class FakeMember final : public control::AgentPort {
 public:
  /// `port` is its own, and calls back on `strand`.
  FakeMember(std::unique_ptr<control::CoordinatorPort> port, ThreadExecutor& strand,
             control::GroupRole role, std::string group, uint32_t ranks, uint64_t number);

  /// Opens a session and registers the ranks, each with rows of one tensor; `ready` once.
  void Open(std::function<void()> ready);
  /// By every rank; `released` when the last one is.
  void Publish(Version version, std::function<void(Status)> released);
  /// Adds the bytes of commands that come from now on.
  void CountBytes(std::shared_ptr<int64_t> bytes) { bytes_ = std::move(bytes); }

  void OnCommand(epoch::Command command) override;
  void OnSessionLost(Status why) override;

 private:
  using SlicePtr = std::shared_ptr<const plan::RankSlice>;

  void Beat(Nanos interval);
  void Register(uint32_t rank);
  void Submit(uint32_t rank, const epoch::Member& member);
  void Answer(const epoch::PrepareCommand& command);
  void Answer(const epoch::TransferCommand& command);
  void Answer(const epoch::ReleaseCommand& command);
  void Answer(const epoch::CommitCommand& command);
  void Answer(const epoch::AbortCommand& command);
  void Answer(const epoch::EvictCommand& command);
  void Answer(const epoch::CommittedEverywhereCommand&) {}
  void Answer(const epoch::StaleCommand&) {}
  void Answer(const epoch::ExcludeCommand&) {}  // it moves no byte that a reader could wait for
  void Answer(const epoch::HashCommand&) {}
  void Fetched(const epoch::PrepareCommand& command, size_t assignment);

  ThreadExecutor& strand_;
  const control::GroupRole role_;
  const std::string group_;
  const uint32_t ranks_;
  const uint64_t number_;
  AgentId id_{};
  std::map<uint32_t, epoch::Member> members_;  ///< by rank
  uint32_t submitted_ = 0;
  std::map<epoch::Member, epoch::PrepareCommand> prepared_;
  std::map<std::pair<PlanId, uint32_t>, SlicePtr> slices_;  ///< by plan and rank
  std::function<void()> ready_;
  uint32_t awaited_ = 0;
  std::function<void(Status)> released_;
  std::shared_ptr<int64_t> bytes_;                         ///< null: not counted
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);  ///< the next beat looks at it
  std::unique_ptr<control::CoordinatorPort> port_;         ///< goes first: it calls back
};

}  // namespace weightwire::load
