#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class AgentSession : public AgentTest {};

TEST_F(AgentSession, SaysWhoItIs) {
  options.job = "job-7";
  options.addresses = {{"tcp", "10.0.0.1:99"}};
  Start();
  ASSERT_EQ(coordinator.hellos.size(), 1u);
  EXPECT_EQ(coordinator.hellos[0].job, "job-7");
  EXPECT_EQ(coordinator.hellos[0].name, "pod-1");
  EXPECT_EQ(coordinator.hellos[0].incarnation, Incarnation{77});
  EXPECT_EQ(coordinator.hellos[0].host, "host-1");
  EXPECT_EQ(coordinator.hellos[0].addresses, options.addresses);
  EXPECT_TRUE(agent->SessionStatus().ok());
}

TEST_F(AgentSession, BeatsAtLeastOnceInEveryInterval) {
  Start();
  sim.RunFor(seconds(20));
  Nanos last{0};
  for (const auto& [at, id] : coordinator.beats) {
    EXPECT_LE(at - last, seconds(1));
    EXPECT_EQ(id, AgentId{1});
    last = at;
  }
  EXPECT_GE(last, seconds(19));
  EXPECT_LE(coordinator.beats.size(), 30u);
}

TEST_F(AgentSession, TriesAgainWithPausesThatGrowFourfold) {
  coordinator.open_answer = Status(Code::kUnavailable, Reason::kTransportFailed, "refused");
  Start();
  ExpectStatus(agent->SessionStatus(), Code::kUnavailable, Reason::kNotReady);
  EXPECT_THAT(agent->SessionStatus().message(), HasSubstr("refused"));
  sim.RunFor(milliseconds(4'800));
  std::vector<int64_t> pauses_ms;
  for (size_t i = 1; i < coordinator.opened_at.size(); ++i) {
    pauses_ms.push_back((coordinator.opened_at[i] - coordinator.opened_at[i - 1]) /
                        milliseconds(1));
  }
  EXPECT_THAT(pauses_ms, ElementsAre(250, 500, 1000, 1000, 1000, 1000));
  coordinator.open_answer = OkStatus();
  sim.RunFor(seconds(4));
  EXPECT_TRUE(agent->SessionStatus().ok());
}

TEST_F(AgentSession, OpensANewOneWhenLost) {
  Start();
  coordinator.agent_port->OnSessionLost(
      Status(Code::kUnavailable, Reason::kLeaseExpired, "no heartbeat"));
  sim.RunReady();
  ExpectStatus(agent->SessionStatus(), Code::kUnavailable, Reason::kNotReady);
  const size_t beats = coordinator.beats.size();
  sim.RunFor(milliseconds(249));
  EXPECT_EQ(coordinator.hellos.size(), 1u);
  EXPECT_EQ(coordinator.beats.size(), beats) << "heartbeats of a lost session go on";
  sim.RunFor(milliseconds(1));
  EXPECT_TRUE(agent->SessionStatus().ok());
  EXPECT_EQ(coordinator.beats.back().second, AgentId{2});
}

TEST_F(AgentSession, IsClosedWhenTheAgentGoes) {
  Start();
  agent.reset();
  EXPECT_THAT(coordinator.closed, ElementsAre(AgentId{1}));
  sim.RunFor(seconds(10));
  EXPECT_LE(coordinator.beats.size(), 1u);
}

}  // namespace
}  // namespace weightwire::agent
