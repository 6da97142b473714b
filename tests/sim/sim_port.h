#pragma once

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "server/coordinator/coordinator.h"
#include "tests/support/sim_executor.h"

namespace weightwire::sim {

/// The way between one agent and the coordinator, as gRPC is one: a session stream that keeps its
/// order in each direction, and unary calls that may overtake it and each other. Every call is
/// answered once, at the latest by a deadline. Outlives agents and coordinators.
class SimPort final : public control::CoordinatorPort {
 public:
  /// `coordinator` gives the one that runs now, or null.
  SimPort(testing::SimExecutor& executor, std::mt19937_64& random,
          std::function<coordinator::Coordinator*()> coordinator);
  ~SimPort() override;

  /// Messages take up to `delay_max` from now on.
  void SetDelay(Nanos delay_max) { delay_max_ = delay_max; }
  /// Some reports arrive twice from now on.
  void RepeatReports() { repeats_ = true; }
  /// Nothing arrives for `span`, in either direction; then everything does.
  void Stall(Nanos span);
  /// The connection breaks. The coordinator learns at once, or only by the lease.
  void Cut(bool coordinator_learns);
  /// No call reaches the coordinator for `span`: each is refused at once.
  void Refuse(Nanos span) { refused_until_ = executor_.Now() + span; }
  /// The agent's process ends: nobody is called there any more. Else as Cut.
  void Kill(bool coordinator_learns);
  /// A new process of the agent may use the port.
  void Revive() { dead_ = false; }

  /// Called with every command that the coordinator sends.
  std::function<void(const epoch::Command&)> on_command;
  /// Called when a coordinator gives a session up, or is told that it has ended.
  std::function<void()> on_session_over;

  void OpenSession(control::AgentHello hello, control::AgentPort* port,
                   control::Reply<control::AgentWelcome> reply) override;
  void CloseSession(AgentId agent) override;
  void Heartbeat(AgentId agent, control::Beat beat) override;
  void Register(control::RegisterRequest request,
                control::Reply<control::RegisterReply> reply) override;
  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override;
  void Publish(control::PublishRequest request, control::Done done) override;
  void Withdraw(control::WithdrawRequest request, control::Done done) override;
  void FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                  control::Reply<std::shared_ptr<const plan::RankSlice>> reply) override;
  void Report(AgentId agent, epoch::Report report) override;

 private:
  /// What the coordinator sees of one connection; stays valid when the connection is gone.
  class Link;

  Nanos Delay() { return Nanos(static_cast<int64_t>(random_() % (delay_max_.count() + 1))); }
  Nanos Due() { return std::max(executor_.Now() + Delay(), stalled_until_); }
  void At(Nanos due, Task task) { executor_.PostAfter(due - executor_.Now(), std::move(task)); }
  /// Up the session's stream.
  void Up(std::function<void(coordinator::Coordinator&)> deliver);
  /// Down the session's stream of connection `link`.
  void Down(uint64_t link, std::function<void(control::AgentPort&)> deliver);
  /// A call that must be answered: `fail` by us, or what `call` was given by the coordinator.
  template <typename Answer>
  void Call(std::function<void(Answer)> reply,
            std::function<void(coordinator::Coordinator&, std::function<void(Answer)>)> call);

  testing::SimExecutor& executor_;
  std::mt19937_64& random_;
  const std::function<coordinator::Coordinator*()> coordinator_;
  Nanos delay_max_{0};
  Nanos stalled_until_{0}, refused_until_{0}, last_up_{0}, last_down_{0};
  control::AgentPort* agent_ = nullptr;
  bool repeats_ = false;
  bool dead_ = false;    ///< what a killed process still says is not sent
  AgentId session_{};    ///< open session, 0 = none
  bool untold_ = false;  ///< the agent is about to learn that its session ended
  uint64_t link_ = 0;    ///< of the connection; a message of an older one is lost
  uint64_t next_call_ = 1;
  struct Unanswered {
    Executor::TimerId timer = 0;
    std::function<void(Status)> fail;
  };
  std::map<uint64_t, Unanswered> unanswered_;
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace weightwire::sim
