#include "tests/sim/sim_port.h"

namespace weightwire::sim {
namespace {

constexpr Nanos kCallDeadline = std::chrono::seconds(10);
constexpr Nanos kRepeatMax = std::chrono::seconds(2);

Status Broken() {
  return Status(Code::kUnavailable, Reason::kTransportFailed, "the connection broke");
}

Status AnswerOf(std::function<void(Status)>*, Status why) { return why; }
template <typename T>
Result<T> AnswerOf(std::function<void(Result<T>)>*, Status why) {
  return Fail(std::move(why));
}

}  // namespace

class SimPort::Link final : public control::AgentPort {
 public:
  Link(SimPort& port, uint64_t number) : port_(port), number_(number) {}
  void OnCommand(epoch::Command command) override {
    if (port_.on_command) port_.on_command(command);
    port_.Down(number_, [command = std::move(command)](control::AgentPort& agent) {
      agent.OnCommand(command);
    });
  }
  void OnSessionLost(Status why) override {
    if (port_.on_session_over) port_.on_session_over();
    port_.Down(number_, [this, why = std::move(why)](control::AgentPort& agent) {
      ++port_.link_;
      port_.session_ = {};
      agent.OnSessionLost(why);
    });
  }

 private:
  SimPort& port_;
  const uint64_t number_;
};

SimPort::SimPort(testing::SimExecutor& executor, std::mt19937_64& random,
                 std::function<coordinator::Coordinator*()> coordinator)
    : executor_(executor), random_(random), coordinator_(std::move(coordinator)) {}

SimPort::~SimPort() = default;

void SimPort::Stall(Nanos span) { stalled_until_ = executor_.Now() + span; }

void SimPort::Cut(bool coordinator_learns) {
  ++link_;
  const AgentId session = std::exchange(session_, {});
  for (auto& [id, call] : std::exchange(unanswered_, {})) {
    executor_.Cancel(call.timer);
    executor_.Post([fail = std::move(call.fail)] { fail(Broken()); });
  }
  if (session.value == 0 && !untold_) return;
  auto* coordinator = coordinator_();
  if (coordinator != nullptr && coordinator_learns && session.value != 0) {
    if (on_session_over) on_session_over();
    coordinator->Disconnected(session);
  }
  if (agent_ != nullptr) {
    untold_ = true;  // a second cut right now must not be why it never learns
    executor_.Post([this, link = link_] {
      if (agent_ == nullptr || link != link_) return;
      untold_ = false;
      agent_->OnSessionLost(Broken());
    });
  }
}

void SimPort::Kill(bool coordinator_learns) {
  dead_ = true;
  agent_ = nullptr;
  unanswered_.clear();
  Cut(coordinator_learns);
}

void SimPort::Up(std::function<void(coordinator::Coordinator&)> deliver) {
  if (dead_) return;
  last_up_ = std::max(last_up_, Due());
  At(last_up_, [this, link = link_, deliver = std::move(deliver)] {
    auto* coordinator = coordinator_();
    if (link == link_ && coordinator != nullptr && executor_.Now() >= refused_until_) {
      deliver(*coordinator);
    }
  });
}

void SimPort::Down(uint64_t link, std::function<void(control::AgentPort&)> deliver) {
  last_down_ = std::max(last_down_, Due());
  At(last_down_, [this, link, deliver = std::move(deliver)] {
    if (link == link_ && agent_ != nullptr) deliver(*agent_);
  });
}

template <typename Answer>
void SimPort::Call(
    std::function<void(Answer)> reply,
    std::function<void(coordinator::Coordinator&, std::function<void(Answer)>)> call) {
  if (dead_) return;
  const uint64_t id = next_call_++;
  const auto fail = [this, id](Status why) {
    if (auto node = unanswered_.extract(id); !node.empty()) node.mapped().fail(std::move(why));
  };
  const auto timer = executor_.PostAfter(kCallDeadline, [fail] {
    fail(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "the call timed out"));
  });
  unanswered_[id] = {
      timer, [reply](Status why) {
        reply(AnswerOf(static_cast<std::function<void(Answer)>*>(nullptr), std::move(why)));
      }};
  At(Due(), [=, this, call = std::move(call), reply = std::move(reply)] {
    if (!unanswered_.contains(id)) return;  // cut meanwhile
    auto* coordinator = coordinator_();
    if (coordinator == nullptr || executor_.Now() < refused_until_) return fail(Broken());
    call(*coordinator, [this, id, reply](Answer answer) {
      At(Due(), [this, id, reply, answer = std::move(answer)] {
        const auto node = unanswered_.extract(id);
        if (node.empty()) return;
        executor_.Cancel(node.mapped().timer);
        reply(answer);
      });
    });
  });
}

void SimPort::OpenSession(control::AgentHello hello, control::AgentPort* port,
                          control::Reply<control::AgentWelcome> reply) {
  agent_ = port;
  untold_ = false;
  const uint64_t link = ++link_;
  links_.push_back(std::make_unique<Link>(*this, link));
  Link* seen = links_.back().get();
  auto opened = [this, link, reply = std::move(reply)](Result<control::AgentWelcome> welcome) {
    if (welcome && link == link_) session_ = welcome->agent;
    reply(std::move(welcome));
  };
  Call<Result<control::AgentWelcome>>(
      std::move(opened),
      [hello = std::move(hello), seen](coordinator::Coordinator& coordinator, auto answer) {
        coordinator.OpenSession(hello, seen, std::move(answer));
      });
}

void SimPort::CloseSession(AgentId agent) {
  Up([this, agent](coordinator::Coordinator& coordinator) {
    if (on_session_over) on_session_over();
    coordinator.CloseSession(agent);
  });
  agent_ = nullptr;
}
void SimPort::Heartbeat(AgentId agent, control::Beat beat) {
  Up([agent, beat = std::move(beat)](coordinator::Coordinator& coordinator) {
    coordinator.Heartbeat(agent, beat);
  });
}
void SimPort::Report(AgentId agent, epoch::Report report) {
  const auto deliver = [agent, report = std::move(report)](coordinator::Coordinator& coordinator) {
    coordinator.Report(agent, report);
  };
  Up(deliver);
  if (!repeats_ || random_() % 8 != 0) return;
  // Once more and out of order, as a call that was repeated because its answer was lost; maybe so
  // late that another epoch runs.
  At(Due() + Nanos(static_cast<int64_t>(random_() % kRepeatMax.count())),
     [this, link = link_, deliver] {
       auto* coordinator = coordinator_();
       if (link == link_ && coordinator != nullptr) deliver(*coordinator);
     });
}
void SimPort::Register(control::RegisterRequest request,
                       control::Reply<control::RegisterReply> reply) {
  Call<Result<control::RegisterReply>>(
      std::move(reply),
      [request = std::move(request)](coordinator::Coordinator& coordinator, auto answer) {
        coordinator.Register(request, std::move(answer));
      });
}
void SimPort::SubmitLayout(control::LayoutSubmission submission,
                           control::Reply<control::LayoutReply> reply) {
  Call<Result<control::LayoutReply>>(
      std::move(reply),
      [submission = std::move(submission)](coordinator::Coordinator& coordinator, auto answer) {
        coordinator.SubmitLayout(submission, std::move(answer));
      });
}
void SimPort::Publish(control::PublishRequest request, control::Done done) {
  Call<Status>(std::move(done),
               [request = std::move(request)](coordinator::Coordinator& coordinator, auto answer) {
                 coordinator.Publish(request, std::move(answer));
               });
}
void SimPort::Withdraw(control::WithdrawRequest request, control::Done done) {
  Call<Status>(std::move(done), [request](coordinator::Coordinator& coordinator, auto answer) {
    coordinator.Withdraw(request, std::move(answer));
  });
}
void SimPort::FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                         control::Reply<std::shared_ptr<const plan::RankSlice>> reply) {
  Call<Result<std::shared_ptr<const plan::RankSlice>>>(
      std::move(reply), [plan, side, rank](coordinator::Coordinator& coordinator, auto answer) {
        coordinator.FetchSlice(plan, side, rank, std::move(answer));
      });
}

}  // namespace weightwire::sim
