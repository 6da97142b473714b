#include "server/rpc/local_coordinator_port.h"

#include <functional>
#include <utility>

namespace weightwire::rpc {
namespace {

/// What the coordinator calls, on its strand. It holds a bare pointer between OpenSession and
/// CloseSession or OnSessionLost: `held` (of the coordinator's strand) keeps the relay for that
/// time. `port` belongs to the agent's strand.
struct Relay final : control::AgentPort, std::enable_shared_from_this<Relay> {
  Relay(Executor& to, control::AgentPort* p) : strand(to), port(p) {}

  void OnCommand(epoch::Command command) override {
    strand.Post([self = shared_from_this(), command = std::move(command)]() mutable {
      if (self->port != nullptr) self->port->OnCommand(std::move(command));
    });
  }
  void OnSessionLost(Status why) override {
    strand.Post([self = shared_from_this(), why = std::move(why)]() mutable {
      if (auto* lost = std::exchange(self->port, nullptr)) lost->OnSessionLost(std::move(why));
    });
    const auto last = std::move(held);
  }

  Executor& strand;
  control::AgentPort* port;
  std::shared_ptr<Relay> held;
};

class LocalPort final : public control::CoordinatorPort {
 public:
  LocalPort(control::CoordinatorPort& coordinator, Executor& coordinator_strand,
            Executor& agent_strand)
      : coordinator_(coordinator), there_(coordinator_strand), here_(agent_strand) {}

  ~LocalPort() override {
    if (relay_) relay_->port = nullptr;
  }

  void OpenSession(control::AgentHello hello, control::AgentPort* port,
                   control::Reply<control::AgentWelcome> reply) override {
    if (relay_) relay_->port = nullptr;
    relay_ = std::make_shared<Relay>(here_, port);
    there_.Post([&there = coordinator_, relay = relay_, hello = std::move(hello),
                 reply = Back(std::move(reply))]() mutable {
      relay->held = relay;
      there.OpenSession(std::move(hello), relay.get(),
                        [relay, reply = std::move(reply)](Result<control::AgentWelcome> welcome) {
                          if (!welcome) relay->held.reset();
                          reply(std::move(welcome));
                        });
    });
  }

  void CloseSession(AgentId agent) override {
    if (relay_) relay_->port = nullptr;
    there_.Post([&there = coordinator_, relay = relay_, agent] {
      there.CloseSession(agent);
      if (relay) relay->held.reset();
    });
  }

  void Heartbeat(AgentId agent, control::Beat beat) override {
    there_.Post([&there = coordinator_, agent, beat = std::move(beat)]() mutable {
      there.Heartbeat(agent, std::move(beat));
    });
  }

  void Register(control::RegisterRequest request,
                control::Reply<control::RegisterReply> reply) override {
    there_.Post([&there = coordinator_, request = std::move(request),
                 reply = Back(std::move(reply))]() mutable {
      there.Register(std::move(request), std::move(reply));
    });
  }

  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override {
    there_.Post([&there = coordinator_, submission = std::move(submission),
                 reply = Back(std::move(reply))]() mutable {
      there.SubmitLayout(std::move(submission), std::move(reply));
    });
  }

  void Publish(control::PublishRequest request, control::Done done) override {
    there_.Post([&there = coordinator_, request, done = Back(std::move(done))]() mutable {
      there.Publish(request, std::move(done));
    });
  }

  void Withdraw(control::WithdrawRequest request, control::Done done) override {
    there_.Post([&there = coordinator_, request, done = Back(std::move(done))]() mutable {
      there.Withdraw(request, std::move(done));
    });
  }

  void FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                  control::Reply<std::shared_ptr<const plan::RankSlice>> reply) override {
    there_.Post(
        [&there = coordinator_, plan, side, rank, reply = Back(std::move(reply))]() mutable {
          there.FetchSlice(plan, side, rank, std::move(reply));
        });
  }

  void Report(AgentId agent, epoch::Report report) override {
    there_.Post([&there = coordinator_, agent, report = std::move(report)]() mutable {
      there.Report(agent, std::move(report));
    });
  }

 private:
  template <typename Argument>
  std::function<void(Argument)> Back(std::function<void(Argument)> reply) {
    return [&here = here_, reply = std::move(reply)](Argument argument) {
      here.Post([reply, argument = std::move(argument)]() mutable { reply(std::move(argument)); });
    };
  }

  control::CoordinatorPort& coordinator_;
  Executor& there_;
  Executor& here_;
  std::shared_ptr<Relay> relay_;
};

}  // namespace

std::unique_ptr<control::CoordinatorPort> MakeLocalCoordinatorPort(
    control::CoordinatorPort& coordinator, Executor& coordinator_strand, Executor& agent_strand) {
  return std::make_unique<LocalPort>(coordinator, coordinator_strand, agent_strand);
}

}  // namespace weightwire::rpc
