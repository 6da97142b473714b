// The stream lives on gRPC's threads, the session on the coordinator's strand. Between OpenSession
// and Disconnected, CloseSession or OnSessionLost the coordinator holds a bare pointer to the port,
// so `held_` keeps the object alive for exactly that time.
#include "server/rpc/coordinator_session.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/base/failpoint.h"
#include "server/rpc/authorizer.h"
#include "server/rpc/duplex.h"
#include "server/wire/addresses.h"
#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "server/wire/reports.h"
#include "server/wire/status.h"

namespace weightwire::rpc {
namespace {

class SessionStream final : public Duplex<v1::SessionUp, v1::SessionDown>,
                            public control::AgentPort {
 public:
  SessionStream(const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator,
                Acl& acl, Caller caller, std::optional<tls::Token> token, CallLog log)
      : Duplex(runtime, streams, std::move(log)),
        coordinator_(coordinator),
        acl_(acl),
        caller_(std::move(caller)),
        token_(std::move(token)) {}

  // ---- on the strand, from the coordinator
  void OnCommand(epoch::Command command) override {
    v1::SessionDown down = wire::ToProto(command);
    if (remembers_addresses_ && down.has_prepare()) addresses_.Shorten(down.mutable_prepare());
    Send(std::move(down));
  }

  void OnSessionLost(Status why) override {
    v1::SessionDown end;
    *end.mutable_end()->mutable_why() = wire::OutcomeOf(why);
    Send(std::move(end));
    End(std::move(why));
    acl_.Ended(std::exchange(agent_, {}));
    const auto last = std::move(held_);
  }

 private:
  bool OnMessage(const v1::SessionUp& up) override {
    if (greeted_ == (up.kind_case() == v1::SessionUp::kHello)) {
      End(Status(
          Code::kInvalidArgument, Reason::kInvalidRequest,
          greeted_ ? "session: a second hello" : "session: the first message must be the hello"));
      return true;
    }
    switch (up.kind_case()) {
      case v1::SessionUp::kHello:
        greeted_ = true;
        if (auto hello = wire::FromProto(up.hello())) {
          OnStrand([this, hello = std::move(*hello)]() mutable { Open(std::move(hello)); });
        } else {
          End(std::move(hello.error()));
        }
        return true;
      case v1::SessionUp::kHeartbeat:
        OnStrand(
            [this, shown = up.heartbeat().token(), beat = wire::BeatOf(up.heartbeat())]() mutable {
              if (agent_ == AgentId()) return;
              if (Status known = Reauthorise(shown); !known.ok()) return End(std::move(known));
              coordinator_.Heartbeat(agent_, std::move(beat));
            });
        return true;
      case v1::SessionUp::kGoodbye:
        OnStrand([this] {
          goodbye_ = true;
          Close();
          End(OkStatus());
        });
        return true;
      case v1::SessionUp::kReports:
        OnStrand([this, log = this->log().Next("Report"), number = up.reports().number(),
                  reports = reports_.Add(up.reports())]() mutable {
          Take(number, std::move(reports), log);
          ReadOn();
        });
        return false;
      case v1::SessionUp::KIND_NOT_SET:
        break;
    }
    End(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
               "session: a message of a kind that this coordinator does not know"));
    return true;
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
    if (Status may = acl_.CheckOpen(caller_, incarnation, BoundToken()); !may.ok()) {
      return End(std::move(may));
    }
    held_ = shared_from_this();
    remembers_addresses_ = (hello.features & control::kFeatureAddressesOnce) != 0;
    const std::string name = hello.name;
    coordinator_.OpenSession(
        std::move(hello), this,
        [this, self = held_, name, incarnation](Result<control::AgentWelcome> welcome) {
          if (welcome) acl_.Opened(caller_, name, incarnation, welcome->agent, BoundToken());
          Opened(std::move(welcome));
        });
  }

  void Take(uint64_t number, std::vector<Result<wire::AgentReport>> reports, const CallLog& log) {
    if (agent_ == AgentId()) return;
    v1::SessionDown down;
    v1::Reported& reported = *down.mutable_reported();
    Status last;
    const auto refuse = [&](Status why) {
      if (reported.refused_size() < wire::kRefusedMax) {
        *reported.add_refused() = wire::OutcomeOf(why);
      }
      last = std::move(why);
    };
    for (Result<wire::AgentReport>& report : reports) {
      if (!report) {
        refuse(std::move(report.error()));
      } else if (report->agent != agent_) {
        refuse(Status(Code::kPermissionDenied, Reason::kPermissionDenied,
                      "a report of agent " + std::to_string(report->agent.value) +
                          " on the session of agent " + std::to_string(agent_.value)));
      } else {
        coordinator_.Report(agent_, std::move(report->report));
        WW_FAILPOINT("rpc.before_a_report_is_answered");
      }
    }
    log.Ended(last);
    reported.set_number(number);
    if (number != 0 || reported.refused_size() > 0) Send(std::move(down));
  }

  /// With every renewal of the lease: a token that has expired ends the session, unless another one
  /// of the same identity is `shown`.
  Status Reauthorise(const std::string& shown) {
    if (!token_) return OkStatus();
    const int64_t now_s = tls::WallSecondsNow();
    if (!shown.empty()) {
      WW_ASSIGN_OR_STATUS(tls::Token next, runtime().tokens->Verify(shown, now_s));
      if (next.identity != token_->identity) {
        return Status(Code::kPermissionDenied, Reason::kPermissionDenied,
                      "the session of " + token_->identity.Uri() + " goes on with a token of " +
                          next.identity.Uri());
      }
      token_ = std::move(next);
      WW_RETURN_IF_ERROR(acl_.Renew(caller_, agent_, BoundToken()));
    }
    return now_s < token_->expires_s ? OkStatus() : tls::TokenExpired(*token_);
  }

  /// A token for several ranks may be several agents'.
  std::string BoundToken() const {
    const bool one = token_ && token_->identity.rank && token_->identity.rank_last == 0;
    return one ? token_->id : "";
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
    welcome->features |= control::kFeatureReportsOnSession;
    *down.mutable_welcome() = wire::ToProto(*welcome);
    Send(std::move(down));
  }

  void Close() {
    if (agent_ == AgentId()) return held_.reset();  // (an answer under way holds it as well)
    acl_.Ended(agent_);
    const AgentId agent = std::exchange(agent_, {});
    goodbye_ ? coordinator_.CloseSession(agent) : coordinator_.Disconnected(agent);
    held_.reset();
  }

  template <typename Fn>
  void OnStrand(Fn fn) {
    runtime().strand.Post([self = shared_from_this(), fn = std::move(fn)]() mutable { fn(); });
  }

  coordinator::Coordinator& coordinator_;
  Acl& acl_;
  const Caller caller_;
  std::optional<tls::Token> token_;  ///< the strand's, like what follows reports_
  bool greeted_ = false;             ///< gRPC's reading side only, like the next
  wire::ReportsReader reports_;
  // The strand's.
  AgentId agent_{};
  bool ended_ = false;
  bool goodbye_ = false;  ///< the agent leaves; else its connection broke
  std::shared_ptr<Duplex> held_;
  bool remembers_addresses_ = false;  ///< the agent does
  wire::AddressesTold addresses_;
};

}  // namespace

grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown>* StartSession(
    const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator, Acl& acl,
    const grpc::CallbackServerContext& context) {
  auto stream =
      std::make_shared<SessionStream>(runtime, streams, coordinator, acl, CallerOf(context),
                                      TokenOf(context), CallLog(runtime, context, "Session"));
  stream->Begin();
  if (Status exposed = CheckNotExposed(context); !exposed.ok()) stream->End(std::move(exposed));
  return stream.get();
}

}  // namespace weightwire::rpc
