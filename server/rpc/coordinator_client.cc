// gRPC's callbacks come on its own threads and post to the strand at once (client_calls.h); all
// state here is the strand's.
#include "server/rpc/coordinator_client.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include <grpcpp/grpcpp.h>
#include <spdlog/spdlog.h>

#include "server/base/failpoint.h"
#include "server/rpc/callback_threads.h"
#include "server/rpc/random.h"
#include "server/rpc/session_call.h"
#include "server/rpc/trace.h"
#include "server/tls/credentials.h"
#include "server/wire/addresses.h"
#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "server/wire/reports.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"

namespace weightwire::rpc {
namespace {

constexpr Nanos kHelloDeadline = std::chrono::seconds(2);  // the first, where there are several

constexpr size_t kTracesMax = 16;

/// For so long a client that ends waits until its goodbye has been heard.
constexpr Nanos kGoodbye = std::chrono::seconds(1);

using SliceReply = control::Reply<std::shared_ptr<const plan::RankSlice>>;

// A coordinator that is stopped or cut off is given up after 6 s, about as long as a lease: another
// one may lead by then. One that was not there is tried again twice a second, for it may lead now.
std::unique_ptr<v1::Coordinator::Stub> Dial(const tls::Dialer& dialer, const std::string& address,
                                            size_t message_bytes_max) {
  grpc::ChannelArguments arguments;
  // An agreed layout may be longer than what was submitted for it.
  arguments.SetMaxReceiveMessageSize(
      static_cast<int>(std::max(message_bytes_max, wire::kAnswerBytesMax)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 2'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 4'000);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2'000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 200);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return v1::Coordinator::NewStub(dialer.Open(address, std::move(arguments)));
}

/// Puts a slice together as its parts arrive, on gRPC's thread. Deletes itself.
class SliceCall final : public grpc::ClientReadReactor<v1::SlicePart> {
 public:
  SliceCall(std::shared_ptr<ClientCalls> calls, SliceReply reply)
      : calls_(std::move(calls)), reply_(std::move(reply)) {}

  static void Start(v1::Coordinator::Stub& stub, const std::shared_ptr<ClientCalls>& calls,
                    Nanos deadline, v1::FetchSliceRequest request, SliceReply reply) {
    auto call = std::make_unique<SliceCall>(calls, std::move(reply));
    call->request_ = std::move(request);
    SetDeadline(call->context_, deadline);
    if (!calls->Begin(&call->context_)) return;
    SliceCall* running = call.release();
    stub.async()->FetchSlice(&running->context_, &running->request_, running);
    running->StartRead(&running->part_);
    running->StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    failure_ = reader_.Add(part_);
    if (!failure_.ok()) return context_.TryCancel();
    StartRead(&part_);
  }

  void OnDone(const grpc::Status& status) override {
    if (failure_.ok()) failure_ = FromGrpc(status);
    auto slice = std::make_shared<Result<std::shared_ptr<const plan::RankSlice>>>(Take());
    calls_->End(&context_, [reply = std::move(reply_), slice] { reply(std::move(*slice)); });
    delete this;
  }

 private:
  Result<std::shared_ptr<const plan::RankSlice>> Take() {
    WW_FAIL_IF_ERROR(Status(failure_));
    WW_ASSIGN(plan::RankSlice slice, reader_.Finish());
    return std::make_shared<const plan::RankSlice>(std::move(slice));
  }

  const std::shared_ptr<ClientCalls> calls_;
  SliceReply reply_;
  grpc::ClientContext context_;
  v1::FetchSliceRequest request_;
  v1::SlicePart part_;
  wire::SliceReader reader_;
  Status failure_;
};

class CoordinatorClient final : public control::CoordinatorPort {
 public:
  CoordinatorClient(CoordinatorClientOptions options, Executor& strand)
      : options_(std::move(options)), calls_(std::make_shared<ClientCalls>(strand)) {
    WW_CHECK(!options_.addresses.empty());
    KeepCallbackThreads();
    if (!options_.tls.token.empty()) token_ = std::make_shared<tls::TokenFile>(options_.tls.token);
    const tls::Dialer dialer(options_.tls);
    for (const std::string& address : options_.addresses) {
      stubs_.push_back(Dial(dialer, address, options_.message_bytes_max));
    }
  }

  ~CoordinatorClient() override {
    if (session_.call) session_.call->Stop();
    if (leaving_) {
      leaving_->WaitUntilOver(kGoodbye);
      leaving_->Stop();
    }
    calls_->Close();
  }

  void OpenSession(control::AgentHello hello, control::AgentPort* port,
                   control::Reply<control::AgentWelcome> reply) override {
    ForgetSession();
    session_.hello = std::move(hello);
    session_.port = port;
    session_.reply = std::move(reply);
    TryNext();
  }

  void CloseSession(AgentId) override {
    leaving_ = std::exchange(session_.call, nullptr);
    ForgetSession();
    if (!leaving_) return;
    leaving_->Leave();
    calls_->PostAfter(options_.call_deadline, [call = leaving_] { call->Stop(); });
  }

  void Heartbeat(AgentId, control::Beat beat) override {
    if (session_.call) session_.call->Heartbeat(beat);
  }

  void Register(control::RegisterRequest request,
                control::Reply<control::RegisterReply> reply) override {
    if (!MemberLeaves()) return SendRegister(request, std::move(reply));
    const uint64_t id = ++registers_;
    after_leaving_[id] = [this, request = std::move(request), reply = std::move(reply)] {
      SendRegister(request, reply);
    };
    calls_->PostAfter(options_.call_deadline, [this, id] {
      if (const auto waits = after_leaving_.extract(id)) waits.mapped()();
    });
  }

  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override {
    CallUnary<v1::SubmitLayoutResponse>(
        calls_, options_.call_deadline, wire::LayoutRequestOf(submission),
        [this](auto* call, auto done) {
          stub().async()->SubmitLayout(&call->context, &call->request, &call->response, done);
        },
        [reply = std::move(reply)](Result<v1::SubmitLayoutResponse> response) {
          if (!response) return reply(Fail(std::move(response.error())));
          reply(wire::FromProto(*response));
        });
  }

  void Publish(control::PublishRequest request, control::Done done) override {
    CallUnary<v1::PublishVersionResponse>(
        calls_, options_.call_deadline, wire::ToProto(request),
        [this, trace_id = request.trace_id](auto* call, auto finished) {
          SetTrace(call->context, trace_id);
          stub().async()->PublishVersion(&call->context, &call->request, &call->response, finished);
        },
        [done = std::move(done)](Result<v1::PublishVersionResponse> response) {
          done(response ? OkStatus() : std::move(response.error()));
        });
  }

  void Withdraw(control::WithdrawRequest request, control::Done done) override {
    CallUnary<v1::WithdrawVersionResponse>(
        calls_, options_.call_deadline, wire::ToProto(request),
        [this](auto* call, auto finished) {
          stub().async()->WithdrawVersion(&call->context, &call->request, &call->response,
                                          finished);
        },
        [done = std::move(done)](Result<v1::WithdrawVersionResponse> response) {
          done(response ? OkStatus() : std::move(response.error()));
        });
  }

  void FetchSlice(PlanId plan, plan::Side side, uint32_t rank, SliceReply reply) override {
    v1::FetchSliceRequest request;
    *request.mutable_plan() = wire::ToProto(plan);
    request.set_side(static_cast<v1::Side>(side));
    request.set_rank(rank);
    request.set_features(control::kFeatureNamesShared);
    SliceCall::Start(stub(), calls_, options_.call_deadline, std::move(request), std::move(reply));
  }

  void Report(AgentId agent, epoch::Report report) override {
    if (session_.call && session_.reports) {
      const bool lost = std::holds_alternative<epoch::LostReport>(report);
      if (lost) unanswered_ = ++reported_;
      return session_.call->Report(wire::ReportWithin(wire::kReportBytesMax, agent, report),
                                   lost ? reported_ : 0);
    }
    const epoch::Member member = std::visit([](const auto& r) { return r.member; }, report);
    std::deque<v1::ReportRequest>& queue = reports_[member];
    queue.push_back(wire::ReportWithin(options_.message_bytes_max, agent, report));
    if (queue.size() == 1) SendReport(member, options_.report_retry);
  }

 private:
  struct Session {
    control::AgentHello hello;
    size_t tries = 0;
    std::shared_ptr<SessionCall> call;
    control::AgentPort* port = nullptr;
    control::Reply<control::AgentWelcome> reply;  ///< until the welcome
    Status end;                                   ///< why, when the coordinator said it
    bool reports = false;                         ///< the coordinator takes them on the session
    wire::AddressesHeard addresses;
  };

  static void SetTrace(grpc::ClientContext& context, const TraceId& trace_id) {
    if (trace_id != TraceId{}) context.AddMetadata("traceparent", TraceparentOf(trace_id));
  }

  v1::Coordinator::Stub& stub() { return *stubs_[current_]; }

  void TryNext() {
    if (tried_) current_ = (current_ + 1) % stubs_.size();
    tried_ = true;
    ++session_.tries;
    const uint64_t number = ++session_number_;
    session_.call = std::make_shared<SessionCall>(
        calls_,
        SessionCall::Events{[this, number](const v1::SessionDown& down) { OnDown(number, down); },
                            [this, number](Status why) { OnSessionEnded(number, std::move(why)); }},
        token_);
    session_.call->Start(stub(), session_.hello);
    calls_->PostAfter(HelloDeadline(), [this, number] {
      if (number != session_number_ || !session_.reply) return;
      LoseSession(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                         "the coordinator did not answer the hello"));
    });
  }

  /// Of several coordinators one may be stopped, and still accept connections. Longer after each
  /// round: the one that leads may be busy with everybody's hello.
  Nanos HelloDeadline() const {
    if (stubs_.size() == 1) return options_.call_deadline;
    return std::min(kHelloDeadline * (int64_t{1} << std::min(rounds_, 3)), options_.call_deadline);
  }

  /// Ends it without a word to its port. Returns what it was.
  Session ForgetSession() {
    ++session_number_;
    reports_.clear();
    unanswered_ = 0;
    SendWaitingRegisters();
    Session session = std::exchange(session_, {});
    if (session.call) session.call->Stop();
    return session;
  }

  void LoseSession(Status why) {
    if (session_.reply && session_.tries < stubs_.size()) {
      session_.call->Stop();
      return TryNext();
    }
    const Session session = ForgetSession();
    rounds_ += session.reply != nullptr;
    if (session.reply) return session.reply(Fail(std::move(why)));
    session.port->OnSessionLost(std::move(why));
  }

  static Result<epoch::Command> CommandOf(Session& session, v1::SessionDown& down) {
    if (down.has_prepare()) {
      WW_FAIL_IF_ERROR(session.addresses.Complete(down.mutable_prepare()));
    }
    return wire::FromProto(down);
  }

  void OnDown(uint64_t number, v1::SessionDown down) {
    if (number != session_number_) return;
    if (session_.reply) return OnWelcome(down);
    if (down.kind_case() == v1::SessionDown::kEnd) {
      auto why = wire::FromProto("end.why", down.end().why());
      session_.end = why ? std::move(*why) : std::move(why.error());
      return;
    }
    if (down.kind_case() == v1::SessionDown::kReported) return OnReported(down.reported());
    auto command = CommandOf(session_, down);
    if (!command) {
      spdlog::error("a command that is not understood ends the session: {}",
                    command.error().ToString());
      return LoseSession(std::move(command.error()));
    }
    if (const auto* prepare = std::get_if<epoch::PrepareCommand>(&*command)) {
      traces_[prepare->epoch] = prepare->trace_id;
      if (traces_.size() > kTracesMax) traces_.erase(traces_.begin());
    }
    WW_FAILPOINT("rpc.before_a_command_is_taken");
    session_.port->OnCommand(std::move(*command));
  }

  void OnWelcome(const v1::SessionDown& down) {
    if (down.kind_case() != v1::SessionDown::kWelcome) {
      return LoseSession(Status(Code::kInternal, Reason::kInvalidRequest,
                                "the coordinator's first message is no welcome"));
    }
    auto welcome = wire::FromProto(down.welcome());
    if (!welcome) return LoseSession(std::move(welcome.error()));
    rounds_ = 0;
    session_.reports = (welcome->features & control::kFeatureReportsOnSession) != 0;
    std::exchange(session_.reply, nullptr)(std::move(welcome));
  }

  void OnReported(const v1::Reported& reported) {
    for (const v1::Outcome& refused : reported.refused()) {
      const auto why = wire::FromProto("reported.refused", refused);
      LogRefused(why ? *why : why.error());
    }
    if (reported.number() != 0 && reported.number() >= unanswered_) unanswered_ = 0;
    if (!MemberLeaves()) SendWaitingRegisters();
  }

  static void LogRefused(const Status& why) {
    spdlog::info("a report was refused: {}", why.ToString());
  }

  void OnSessionEnded(uint64_t number, Status why) {
    if (number != session_number_) return;
    if (!session_.end.ok()) why = std::move(session_.end);
    if (why.ok()) {
      why = Status(Code::kUnavailable, Reason::kTransportFailed,
                   "the coordinator closed the session");
    }
    LoseSession(std::move(why));
  }

  /// A report that a member left has not been answered yet.
  bool MemberLeaves() const {
    return unanswered_ != 0 || std::any_of(reports_.begin(), reports_.end(), [](const auto& queue) {
             return std::any_of(queue.second.begin(), queue.second.end(), [](const auto& report) {
               return report.kind_case() == v1::ReportRequest::kLost;
             });
           });
  }

  void SendRegister(const control::RegisterRequest& request,
                    control::Reply<control::RegisterReply> reply) {
    CallUnary<v1::RegisterResponse>(
        calls_, options_.call_deadline, wire::ToProto(request),
        [this](auto* call, auto done) {
          stub().async()->Register(&call->context, &call->request, &call->response, done);
        },
        [reply = std::move(reply)](Result<v1::RegisterResponse> response) {
          if (!response) return reply(Fail(std::move(response.error())));
          auto member = wire::FromProto("member", response->member());
          if (!member) return reply(Fail(std::move(member.error())));
          reply(control::RegisterReply{*member, response->lineage(), Version(response->floor())});
        });
  }

  void SendWaitingRegisters() {
    for (auto& [id, send] : std::exchange(after_leaving_, {})) send();
  }

  void SendReport(const epoch::Member& member, Nanos retry) {
    CallUnary<v1::ReportResponse>(
        calls_, options_.call_deadline, reports_[member].front(),
        [this](auto* call, auto done) {
          const auto trace = traces_.find(Epoch(call->request.epoch()));
          if (trace != traces_.end()) SetTrace(call->context, trace->second);
          stub().async()->Report(&call->context, &call->request, &call->response, done);
        },
        [this, member, retry, number = session_number_](Result<v1::ReportResponse> response) {
          if (number != session_number_) return;
          Reported(member, retry, response ? OkStatus() : response.error());
        });
  }

  void Reported(const epoch::Member& member, Nanos retry, const Status& status) {
    if (status.code() == Code::kUnavailable || status.code() == Code::kDeadlineExceeded) {
      const auto half = static_cast<uint64_t>(retry.count()) / 2;
      const Nanos pause(static_cast<int64_t>(half + RandomNonZero() % (half + 1)));
      calls_->PostAfter(pause, [this, member, retry, number = session_number_] {
        if (number != session_number_) return;
        SendReport(member, std::min(2 * retry, 16 * options_.report_retry));
      });
      return;
    }
    if (!status.ok()) LogRefused(status);
    auto queue = reports_.find(member);
    queue->second.pop_front();
    if (queue->second.empty()) {
      reports_.erase(queue);
    } else {
      SendReport(member, options_.report_retry);
    }
    if (!MemberLeaves()) SendWaitingRegisters();
  }

  const CoordinatorClientOptions options_;
  std::shared_ptr<tls::TokenFile> token_;  ///< null: a certificate, or plaintext
  std::vector<std::unique_ptr<v1::Coordinator::Stub>> stubs_;
  size_t current_ = 0;  ///< of stubs_: every session that ends, or cannot be opened, tries the next
  bool tried_ = false;
  int rounds_ = 0;  ///< through all addresses, in vain
  const std::shared_ptr<ClientCalls> calls_;
  uint64_t session_number_ = 0;  ///< rises when a session begins and when it is over
  Session session_;
  std::shared_ptr<SessionCall> leaving_;  ///< says goodbye
  uint64_t reported_ = 0;                 ///< reports on sessions that members left, all counted
  uint64_t unanswered_ = 0;  ///< the newest of these, until the coordinator has taken it
  /// To a coordinator that takes none on the session. By member, in order; the first one is on its
  /// way.
  std::map<epoch::Member, std::deque<v1::ReportRequest>> reports_;
  /// Two calls are not ordered by gRPC: the place of a process that left is free when that has been
  /// answered.
  std::map<uint64_t, Task> after_leaving_;
  uint64_t registers_ = 0;           ///< that ever waited there
  std::map<Epoch, TraceId> traces_;  ///< of the newest epochs that were prepared here
};

}  // namespace

std::unique_ptr<control::CoordinatorPort> MakeGrpcCoordinatorClient(
    CoordinatorClientOptions options, Executor& strand) {
  return std::make_unique<CoordinatorClient>(std::move(options), strand);
}

}  // namespace weightwire::rpc
