#include "server/rpc/coordinator_client.h"

#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
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

/// A coordinator that answers reports only when it is told to, and all else at once.
class HoldingService final : public v1::Coordinator::CallbackService {
 public:
  ~HoldingService() override { AnswerReports(); }

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
