// The stream lives on gRPC's threads, the session on the coordinator's strand. Between OpenSession
// and CloseSession or OnSessionLost the coordinator holds a bare pointer to the port, so `held_`
// keeps the object alive for exactly that time.
#include "server/rpc/coordinator_session.h"

#include <memory>
#include <utility>

#include "server/rpc/duplex.h"
#include "server/rpc/gatekeeper.h"
#include "server/wire/control.h"
#include "server/wire/status.h"

namespace weightwire::rpc {
namespace {

class SessionStream final : public Duplex<v1::SessionUp, v1::SessionDown>,
                            public control::AgentPort {
 public:
  SessionStream(const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator,
                Owners& owners, Caller caller, CallLog log)
      : Duplex(runtime, streams, std::move(log)),
        coordinator_(coordinator),
        owners_(owners),
        caller_(std::move(caller)) {}

  // ---- on the strand, from the coordinator
  void OnCommand(epoch::Command command) override { Send(wire::ToProto(command)); }

  void OnSessionLost(Status why) override {
    v1::SessionDown end;
    *end.mutable_end()->mutable_why() = wire::OutcomeOf(why);
    Send(std::move(end));
    End(std::move(why));
    owners_.Ended(std::exchange(agent_, {}));
    const auto last = std::move(held_);
  }

 private:
  void OnMessage(const v1::SessionUp& up) override {
    if (up.kind_case() == v1::SessionUp::kHello && !greeted_) {
      greeted_ = true;
      auto hello = wire::FromProto(up.hello());
      if (!hello) return End(std::move(hello.error()));
      return OnStrand([this, hello = std::move(*hello)]() mutable { Open(std::move(hello)); });
    }
    if (up.kind_case() == v1::SessionUp::kHeartbeat && greeted_) {
      return OnStrand([this] {
        if (agent_ != AgentId()) coordinator_.Heartbeat(agent_);
      });
    }
    End(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
               greeted_ ? "session: after the hello only heartbeats may follow"
                        : "session: the first message must be the hello"));
  }

  void OnEnded() override {
    OnStrand([this] {
      ended_ = true;
      Close();
    });
  }

  // ---- on the strand
  void Open(control::AgentHello hello) {
    const Incarnation incarnation = hello.incarnation;
    if (Status may = owners_.CheckOpen(caller_, incarnation); !may.ok()) return End(std::move(may));
    held_ = shared_from_this();
    coordinator_.OpenSession(
        std::move(hello), this,
        [this, self = held_, incarnation](Result<control::AgentWelcome> welcome) {
          if (welcome) owners_.Opened(caller_, incarnation, welcome->agent);
          Opened(std::move(welcome));
        });
  }

  void Opened(Result<control::AgentWelcome> welcome) {
    if (!welcome) {
      End(std::move(welcome.error()));
      held_.reset();
      return;
    }
    agent_ = welcome->agent;
    if (ended_) return Close();
    v1::SessionDown down;
    *down.mutable_welcome() = wire::ToProto(*welcome);
    Send(std::move(down));
  }

  void Close() {
    if (agent_ == AgentId()) return held_.reset();  // (an answer under way holds it as well)
    owners_.Ended(agent_);
    coordinator_.CloseSession(std::exchange(agent_, {}));
    held_.reset();
  }

  template <typename Fn>
  void OnStrand(Fn fn) {
    runtime().strand.Post([self = shared_from_this(), fn = std::move(fn)]() mutable { fn(); });
  }

  coordinator::Coordinator& coordinator_;
  Owners& owners_;
  const Caller caller_;
  bool greeted_ = false;  ///< gRPC's reading side only
  // The strand's.
  AgentId agent_{};
  bool ended_ = false;
  std::shared_ptr<Duplex> held_;
};

}  // namespace

grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown>* StartSession(
    const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator,
    Owners& owners, const grpc::CallbackServerContext& context) {
  auto stream =
      std::make_shared<SessionStream>(runtime, streams, coordinator, owners, CallerOf(context),
                                      CallLog(runtime, context, "Session"));
  stream->Begin();
  return stream.get();
}

}  // namespace weightwire::rpc
