#include <array>
#include <set>

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

TEST_F(AgentSession, AHeartbeatNamesTheProcessesThatAreStoppedAndWhoWasRefused) {
  std::set<int64_t> stopped;
  control::Troubles refused;
  options.stopped = [&stopped](int64_t pid) { return stopped.contains(pid); };
  options.refused = [&refused] { return refused; };
  Start();
  AttachRequest request = RequestFor(control::GroupRole::kEngine, "engine-a");
  request.pid = 4'711;
  const auto one = Attach(request);
  sim.RunFor(seconds(2));
  EXPECT_THAT(coordinator.troubles, IsEmpty());
  stopped = {4'711, 4'712};
  refused = {{{}, "refused a process of uid 7", "the same user"}};
  sim.RunFor(seconds(1));
  ASSERT_EQ(coordinator.troubles.size(), 2u) << "nobody who attached has the other pid";
  EXPECT_EQ(coordinator.troubles[0], refused[0]);
  EXPECT_EQ(coordinator.troubles[1].member, one->member);
  EXPECT_EQ(coordinator.troubles[1].what, "its process 4711 is stopped");
  stopped.clear();
  refused.clear();
  sim.RunFor(seconds(1));
  EXPECT_THAT(coordinator.troubles, IsEmpty()) << "it goes on";
}

TEST_F(AgentSession, TriesAgainWithPausesWhoseBoundGrowsFourfold) {
  coordinator.open_answer = Status(Code::kUnavailable, Reason::kTransportFailed, "refused");
  Start();
  ExpectStatus(agent->SessionStatus(), Code::kUnavailable, Reason::kNotReady);
  EXPECT_THAT(agent->SessionStatus().message(), HasSubstr("refused"));
  sim.RunFor(seconds(60));
  const std::vector<Nanos>& at = coordinator.opened_at;
  EXPECT_LE(at.at(1) - at[0], milliseconds(250));
  EXPECT_LE(at.at(2) - at[1], milliseconds(500));
  EXPECT_GE(at.size(), 60u);
  EXPECT_LE(at.size(), 240u) << "half a second each, on average";
  for (size_t i = 3; i < at.size(); ++i) EXPECT_LE(at[i] - at[i - 1], seconds(1));
  coordinator.open_answer = OkStatus();
  sim.RunFor(seconds(4));
  EXPECT_TRUE(agent->SessionStatus().ok());
}

TEST_F(AgentSession, AgentsThatLostACoordinatorTogetherComeBackSpread) {
  constexpr int kAgents = 400;
  std::array<int, 5> came_back{};  // in each fifth of the bound
  for (uint64_t i = 1; i <= kAgents; ++i) {
    options.incarnation = Incarnation(i * 0x123456789abcdef);
    Start();
    coordinator.opened_at.clear();
    const Nanos lost = sim.Now();
    coordinator.agent_port->OnSessionLost(
        Status(Code::kUnavailable, Reason::kTransportFailed, "gone"));
    sim.RunFor(milliseconds(250));
    ASSERT_EQ(coordinator.opened_at.size(), 1u);
    const auto fifth = (coordinator.opened_at[0] - lost - Nanos(1)) / milliseconds(50);
    ++came_back.at(static_cast<size_t>(fifth));
    agent.reset();
  }
  for (const int count : came_back) EXPECT_GT(count, kAgents / 10);
}

TEST_F(AgentSession, OpensANewOneWhenLost) {
  Start();
  coordinator.agent_port->OnSessionLost(
      Status(Code::kUnavailable, Reason::kLeaseExpired, "no heartbeat"));
  sim.RunReady();
  ExpectStatus(agent->SessionStatus(), Code::kUnavailable, Reason::kNotReady);
  const size_t beats = coordinator.beats.size();
  sim.RunFor(milliseconds(250));
  EXPECT_EQ(coordinator.hellos.size(), 2u);
  EXPECT_EQ(coordinator.beats.size(), beats + 1) << "heartbeats of a lost session go on";
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
