#include "server/rpc/local_coordinator_port.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/sim_executor.h"

namespace weightwire::rpc {
namespace {

/// Answers at once and remembers the port that it may call.
class FakeCoordinator final : public control::CoordinatorPort {
 public:
  void OpenSession(control::AgentHello, control::AgentPort* agent,
                   control::Reply<control::AgentWelcome> reply) override {
    if (refuse) return reply(Fail(Code::kUnavailable, Reason::kShuttingDown, "no"));
    port = agent;
    reply(control::AgentWelcome{AgentId(7), 1, Nanos(1), Nanos(2)});
  }
  void CloseSession(AgentId) override { port = nullptr; }
  void Heartbeat(AgentId, control::Beat) override { ++heartbeats; }
  void Register(control::RegisterRequest, control::Reply<control::RegisterReply> reply) override {
    reply(control::RegisterReply{});
  }
  void SubmitLayout(control::LayoutSubmission,
                    control::Reply<control::LayoutReply> reply) override {
    reply(control::LayoutReply{});
  }
  void Publish(control::PublishRequest, control::Done done) override { done(OkStatus()); }
  void Withdraw(control::WithdrawRequest, control::Done done) override { done(OkStatus()); }
  void FetchSlice(PlanId, plan::Side, uint32_t,
                  control::Reply<std::shared_ptr<const plan::RankSlice>> reply) override {
    reply(std::make_shared<const plan::RankSlice>());
  }
  void Report(AgentId, epoch::Report) override {}

  /// As a coordinator that stops does: no session stays open.
  void EndSession() {
    if (auto* open = std::exchange(port, nullptr)) {
      open->OnSessionLost(Status(Code::kUnavailable, Reason::kLeaseExpired, "late"));
    }
  }

  control::AgentPort* port = nullptr;
  bool refuse = false;
  int heartbeats = 0;
};

struct FakeAgent final : control::AgentPort {
  void OnCommand(epoch::Command command) override {
    epochs.push_back(std::get<epoch::TransferCommand>(command).epoch.value);
  }
  void OnSessionLost(Status why) override { lost = std::move(why); }
  std::vector<uint64_t> epochs;
  std::optional<Status> lost;
};

class LocalPortTest : public ::testing::Test {
 protected:
  ~LocalPortTest() override { coordinator_.EndSession(); }
  void Open() {
    port_->OpenSession({}, &agent_, [this](Result<control::AgentWelcome> welcome) {
      welcome_ = std::move(welcome);
    });
    Settle();
  }
  void Settle() {
    for (int i = 0; i < 4; ++i) {
      there_.RunUntilIdle();
      here_.RunUntilIdle();
    }
  }

  testing::SimExecutor there_, here_;
  FakeCoordinator coordinator_;
  FakeAgent agent_;
  std::unique_ptr<control::CoordinatorPort> port_ =
      MakeLocalCoordinatorPort(coordinator_, there_, here_);
  std::optional<Result<control::AgentWelcome>> welcome_;
};

TEST_F(LocalPortTest, CallsRunThereAndAnswersComeHere) {
  port_->OpenSession({}, &agent_, [this](auto welcome) { welcome_ = std::move(welcome); });
  EXPECT_EQ(coordinator_.port, nullptr);
  there_.RunUntilIdle();
  EXPECT_NE(coordinator_.port, nullptr);
  EXPECT_FALSE(welcome_);
  here_.RunUntilIdle();
  ASSERT_TRUE(welcome_ && *welcome_);
  EXPECT_EQ((*welcome_)->agent, AgentId(7));
}

TEST_F(LocalPortTest, CommandsArriveInOrder) {
  Open();
  for (uint64_t epoch : {1, 2, 3}) {
    coordinator_.port->OnCommand(epoch::TransferCommand{Epoch(epoch), {}});
  }
  EXPECT_TRUE(agent_.epochs.empty());
  here_.RunUntilIdle();
  EXPECT_EQ(agent_.epochs, (std::vector<uint64_t>{1, 2, 3}));
}

TEST_F(LocalPortTest, NothingArrivesAfterTheSessionWasLost) {
  Open();
  coordinator_.port->OnCommand(epoch::TransferCommand{Epoch(1), {}});
  coordinator_.EndSession();
  here_.RunUntilIdle();
  EXPECT_EQ(agent_.epochs.size(), 1u);
  ASSERT_TRUE(agent_.lost);
  EXPECT_EQ(agent_.lost->reason(), Reason::kLeaseExpired);
}

TEST_F(LocalPortTest, CommandsUnderWayDieWithTheSession) {
  Open();
  coordinator_.port->OnCommand(epoch::TransferCommand{Epoch(1), {}});
  port_->CloseSession(AgentId(7));
  Settle();
  EXPECT_TRUE(agent_.epochs.empty());
  EXPECT_EQ(coordinator_.port, nullptr);
}

TEST_F(LocalPortTest, CommandsUnderWayDieWithThePort) {
  Open();
  coordinator_.port->OnCommand(epoch::TransferCommand{Epoch(1), {}});
  port_.reset();
  Settle();
  EXPECT_TRUE(agent_.epochs.empty());
}

TEST_F(LocalPortTest, RefusedSessionsAreAnsweredAndLetGo) {
  coordinator_.refuse = true;
  Open();
  ASSERT_TRUE(welcome_);
  EXPECT_EQ(welcome_->error().reason(), Reason::kShuttingDown);
}

}  // namespace
}  // namespace weightwire::rpc
