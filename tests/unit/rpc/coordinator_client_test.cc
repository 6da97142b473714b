#include "server/rpc/coordinator_client.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <grpcpp/grpcpp.h>

#include "server/base/strand_call.h"
#include "server/base/thread_executor.h"
#include "server/wire/control.h"
#include "weightwire/v1/coordinator.grpc.pb.h"

namespace weightwire::rpc {
namespace {

constexpr Nanos kPatience = std::chrono::seconds(20);

/// One session of an agent that is read from only when it is told to.
class SlowSession final : public grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown> {
 public:
  explicit SlowSession(uint64_t features) {
    down_.mutable_welcome()->set_agent(1);
    down_.mutable_welcome()->set_protocol(1);
    down_.mutable_welcome()->set_features(features);
    down_.mutable_welcome()->set_heartbeat_ms(1'000);
    down_.mutable_welcome()->set_lease_ms(5'000);
    StartRead(&up_);
  }

  /// The next message; nothing when the agent has ended the stream.
  std::optional<v1::SessionUp> Read() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, kPatience, [this] { return arrived_ || ended_; })) return {};
    if (!arrived_) return {};
    arrived_ = false;
    v1::SessionUp up = std::move(up_);
    StartRead(&up_);
    return up;
  }
  void Answer(uint64_t number) {
    std::lock_guard lock(mutex_);
    answer_.mutable_reported()->set_number(number);
    StartWrite(&answer_);
  }
  void End() { Finish(grpc::Status::OK); }

  void OnReadDone(bool ok) override {
    std::lock_guard lock(mutex_);
    if (ok && up_.has_hello()) {
      StartWrite(&down_);
      return StartRead(&up_);
    }
    (ok ? arrived_ : ended_) = true;
    changed_.notify_all();
  }
  void OnDone() override {
    std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }
  void AwaitDone() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  v1::SessionUp up_;
  v1::SessionDown down_, answer_;
  bool arrived_ = false, ended_ = false, done_ = false;
};

/// A coordinator that answers reports only when it is told to, and all else at once.
class HoldingService final : public v1::Coordinator::CallbackService {
 public:
  ~HoldingService() override { AnswerReports(); }

  grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown>* Session(
      grpc::CallbackServerContext*) override {
    std::lock_guard lock(mutex_);
    session_ = std::make_unique<SlowSession>(session_features);
    return session_.get();
  }
  SlowSession& session() { return *session_; }
  uint64_t session_features = control::kFeatureReportsOnSession;

  grpc::ServerUnaryReactor* Report(grpc::CallbackServerContext* context, const v1::ReportRequest*,
                                   v1::ReportResponse*) override {
    std::lock_guard lock(mutex_);
    if (open_) return Answer(context);
    held_.push_back(context->DefaultReactor());
    return held_.back();
  }
  grpc::ServerUnaryReactor* Register(grpc::CallbackServerContext* context,
                                     const v1::RegisterRequest* request,
                                     v1::RegisterResponse* response) override {
    std::lock_guard lock(mutex_);
    registered_while_held_ |= !open_;
    response->mutable_member()->set_participant(1);
    response->mutable_member()->set_incarnation(request->incarnation());
    return Answer(context);
  }
  grpc::ServerUnaryReactor* PublishVersion(grpc::CallbackServerContext* context,
                                           const v1::PublishVersionRequest*,
                                           v1::PublishVersionResponse*) override {
    return Answer(context);
  }

  /// Takes what it was asked first, and is too late for what follows.
  grpc::ServerUnaryReactor* WithdrawVersion(grpc::CallbackServerContext* context,
                                            const v1::WithdrawVersionRequest* request,
                                            v1::WithdrawVersionResponse*) override {
    std::lock_guard lock(mutex_);
    withdrawn_.push_back(*request);
    if (withdrawn_.size() == 1) return Answer(context);
    auto* reactor = context->DefaultReactor();
    reactor->Finish({grpc::StatusCode::FAILED_PRECONDITION, "too late"});
    return reactor;
  }
  std::vector<v1::WithdrawVersionRequest> withdrawn() const {
    std::lock_guard lock(mutex_);
    return withdrawn_;
  }

  void AnswerReports() {
    std::lock_guard lock(mutex_);
    open_ = true;
    for (auto* reactor : std::exchange(held_, {})) reactor->Finish(grpc::Status::OK);
  }
  bool registered_while_held() const {
    std::lock_guard lock(mutex_);
    return registered_while_held_;
  }

 private:
  static grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context) {
    auto* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  mutable std::mutex mutex_;
  bool open_ = false;
  bool registered_while_held_ = false;
  std::vector<v1::WithdrawVersionRequest> withdrawn_;
  std::vector<grpc::ServerUnaryReactor*> held_;
  std::unique_ptr<SlowSession> session_;
};

class CoordinatorClientTest : public ::testing::Test {
 protected:
  explicit CoordinatorClientTest(Nanos call_deadline = 3 * kPatience) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    CoordinatorClientOptions options;
    options.addresses = {"127.0.0.1:" + std::to_string(port)};
    options.call_deadline = call_deadline;
    client_ = MakeGrpcCoordinatorClient(std::move(options), strand_);
  }
  ~CoordinatorClientTest() override {
    service_.AnswerReports();
    OnStrand(strand_, [this] { client_.reset(); });
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  }

  void Report(epoch::Report report) {
    OnStrand(strand_, [&] { client_->Report(AgentId(1), std::move(report)); });
  }
  /// The next process in the place of the member that left.
  std::future<Status> Register() {
    auto answered = std::make_shared<std::promise<Status>>();
    OnStrand(strand_, [&] {
      control::RegisterRequest request;
      request.agent = AgentId(1);
      request.group = "trainer";
      request.world_size = 1;
      request.incarnation = Incarnation(8);
      client_->Register(request, [answered](const Result<control::RegisterReply>& reply) {
        answered->set_value(reply ? OkStatus() : reply.error());
      });
    });
    return answered->get_future();
  }
  /// There and back, by a call that waits for nothing.
  void RoundTrip() {
    std::promise<Status> answered;
    OnStrand(strand_, [&] {
      client_->Publish({}, [&](const Status& status) { answered.set_value(status); });
    });
    auto published = answered.get_future();
    ASSERT_EQ(published.wait_for(kPatience), std::future_status::ready);
    const Status status = published.get();
    ASSERT_TRUE(status.ok()) << status.ToString();
  }
  Status Withdraw(const control::WithdrawRequest& request) {
    std::promise<Status> answered;
    OnStrand(strand_, [&] {
      client_->Withdraw(request, [&](const Status& status) { answered.set_value(status); });
    });
    return answered.get_future().get();
  }
  static void ExpectTaken(std::future<Status> registered) {
    ASSERT_EQ(registered.wait_for(kPatience), std::future_status::ready);
    const Status status = registered.get();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  static constexpr epoch::Member kLeft{ParticipantId(1), Incarnation(7)};
  const epoch::LostReport lost_{kLeft, Status(Code::kCancelled, Reason::kMemberLost, "it left")};
  HoldingService service_;
  std::unique_ptr<grpc::Server> server_;
  ThreadExecutor strand_{"strand", 1};
  std::unique_ptr<control::CoordinatorPort> client_;
};

TEST_F(CoordinatorClientTest, AWithdrawalArrivesAsItIsAndItsAnswerComesBack) {
  const control::WithdrawRequest request{kLeft, Version(5), 3};
  const Status taken = Withdraw(request);
  EXPECT_TRUE(taken.ok()) << taken.ToString();
  EXPECT_EQ(Withdraw(request).code(), Code::kFailedPrecondition);
  ASSERT_EQ(service_.withdrawn().size(), 2u);
  EXPECT_EQ(wire::FromProto(service_.withdrawn()[0]), request);
}

TEST_F(CoordinatorClientTest, RegisterFollowsTheReportThatAMemberLeft) {
  Report(epoch::DrainedReport{Epoch(3), kLeft});
  Report(lost_);
  Report(epoch::DrainedReport{Epoch(4), kLeft});
  auto registered = Register();
  RoundTrip();
  EXPECT_EQ(registered.wait_for(Nanos(0)), std::future_status::timeout);
  service_.AnswerReports();
  ExpectTaken(std::move(registered));
  EXPECT_FALSE(service_.registered_while_held());
  ExpectTaken(Register());
}

TEST_F(CoordinatorClientTest, RegisterWaitsForNoOtherReport) {
  Report(epoch::DrainedReport{Epoch(3), kLeft});
  ExpectTaken(Register());
  EXPECT_TRUE(service_.registered_while_held());
}

TEST_F(CoordinatorClientTest, RegisterGoesOutWhenTheSessionEnds) {
  Report(lost_);
  auto registered = Register();
  OnStrand(strand_, [this] { client_->CloseSession(AgentId(1)); });
  ExpectTaken(std::move(registered));
  EXPECT_TRUE(service_.registered_while_held());
}

/// With a session that is open.
class SessionReportsClientTest : public CoordinatorClientTest, public control::AgentPort {
 protected:
  void Open() {
    std::promise<bool> opened;
    OnStrand(strand_, [&] {
      control::AgentHello hello;
      hello.job = "default";
      hello.name = "agent";
      hello.incarnation = Incarnation(9);
      client_->OpenSession(hello, this,
                           [&](const auto& welcome) { opened.set_value(welcome.has_value()); });
    });
    auto answer = opened.get_future();
    ASSERT_EQ(answer.wait_for(kPatience), std::future_status::ready);
    ASSERT_TRUE(answer.get());
  }
  ~SessionReportsClientTest() override {
    if (!finished_) Finish();
  }
  void Finish() {
    finished_ = true;
    service_.session().End();
    service_.session().AwaitDone();
  }
  void OnCommand(epoch::Command) override {}
  void OnSessionLost(Status) override {}

  static epoch::DrainedReport Drained(uint64_t epoch) { return {Epoch(epoch), kLeft}; }
  bool finished_ = false;
};

TEST_F(SessionReportsClientTest, ThoseThatFindTheSessionBusyTravelTogetherInOrder) {
  Open();
  // Nobody reads yet: what goes out one by one is what fits into a stream's window and
  // into what is buffered on the way. All the others find the session busy.
  constexpr uint64_t kReports = 20'000;
  OnStrand(strand_, [&] {
    for (uint64_t i = 1; i <= kReports; ++i) {
      const std::string text(1'000, 'x');
      client_->Report(AgentId(1), epoch::FailedReport{Epoch(i), kLeft, {Code::kAborted, {}, text}});
    }
  });
  uint64_t next = 1, messages = 0;
  while (next <= kReports) {
    const auto up = service_.session().Read();
    ASSERT_TRUE(up);
    ++messages;
    for (const auto& report : up->reports().reports()) ASSERT_EQ(report.epoch(), next++);
  }
  EXPECT_LT(messages, kReports / 4);
}

TEST_F(SessionReportsClientTest, AHeartbeatIsNotForgottenBehindReports) {
  Open();
  OnStrand(strand_, [&] {
    client_->Heartbeat(AgentId(1), {});
    for (uint64_t i = 1; i <= 1'000; ++i) client_->Report(AgentId(1), Drained(i));
    client_->Heartbeat(AgentId(1), {});
  });
  uint64_t reports = 0;
  int beats = 0;
  while (reports < 1'000 || beats == 0) {
    const auto up = service_.session().Read();
    ASSERT_TRUE(up);
    beats += up->has_heartbeat();
    reports += static_cast<uint64_t>(up->reports().reports_size());
  }
  OnStrand(strand_, [&] {
    client_->Report(AgentId(1), Drained(1));
    client_->Heartbeat(AgentId(1), {});
  });
  const auto report = service_.session().Read();
  const auto beat = service_.session().Read();
  ASSERT_TRUE(report && beat);
  EXPECT_TRUE(beat->has_heartbeat() || report->has_heartbeat());
}

TEST_F(SessionReportsClientTest, RegisterFollowsTheAnswerToTheReportThatAMemberLeft) {
  Open();
  Report(Drained(3));
  Report(lost_);
  Report(Drained(4));
  auto registered = Register();
  uint64_t number = 0;
  for (int reports = 0; reports < 3;) {
    const auto up = service_.session().Read();
    ASSERT_TRUE(up);
    reports += up->reports().reports_size();
    number = std::max(number, up->reports().number());
  }
  ASSERT_NE(number, 0u);
  RoundTrip();
  EXPECT_EQ(registered.wait_for(Nanos(0)), std::future_status::timeout);
  service_.session().Answer(number);
  ExpectTaken(std::move(registered));
}

TEST_F(SessionReportsClientTest, AGoodbyeFollowsTheReports) {
  Open();
  OnStrand(strand_, [&] {
    for (uint64_t i = 1; i <= 100; ++i) client_->Report(AgentId(1), Drained(i));
    client_->CloseSession(AgentId(1));
  });
  int reports = 0;
  for (;;) {
    const auto up = service_.session().Read();
    ASSERT_TRUE(up);
    if (up->has_goodbye()) break;
    reports += up->reports().reports_size();
  }
  EXPECT_EQ(reports, 100);
  EXPECT_FALSE(service_.session().Read());
}

TEST_F(SessionReportsClientTest, ACoordinatorThatTakesNoneOnTheSessionIsCalled) {
  service_.session_features = 0;
  Open();
  Report(lost_);
  auto registered = Register();
  RoundTrip();
  EXPECT_EQ(registered.wait_for(Nanos(0)), std::future_status::timeout);
  service_.AnswerReports();
  ExpectTaken(std::move(registered));
}

struct ImpatientClientTest : CoordinatorClientTest {
  ImpatientClientTest() : CoordinatorClientTest(std::chrono::seconds(1)) {}
};

TEST_F(ImpatientClientTest, RegisterGoesOutAfterOneDeadlineWithoutAnAnswer) {
  Report(lost_);
  ExpectTaken(Register());
  EXPECT_TRUE(service_.registered_while_held());
}

}  // namespace
}  // namespace weightwire::rpc
