#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using control::GroupRole;
using std::chrono::seconds;

TEST(CoordinatorMembership, SecondLiveProcessOfARankIsRefused) {
  Fleet fleet;
  ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, "engine-a", 0, 2, 7).has_value());
  for (const char* agent : {"a", "b"}) {
    const auto second = fleet.Register(agent, GroupRole::kEngine, "engine-a", 0, 2, 8);
    EXPECT_EQ(second.error().code(), Code::kAlreadyExists);
    EXPECT_EQ(second.error().reason(), Reason::kDuplicateRank);
    EXPECT_EQ(second.error().rank(), "engine-a/0");
  }
  EXPECT_EQ(fleet.metrics.Value("registrations_total{role=engine,result=duplicate_rank}"), 2);
}

TEST(CoordinatorMembership, RepeatedRegistrationHasTheSameAnswer) {
  Fleet fleet;
  const auto first = fleet.Register("a", GroupRole::kTrainer, "trainer", 1, 2, 7);
  const auto again = fleet.Register("a", GroupRole::kTrainer, "trainer", 1, 2, 7);
  EXPECT_EQ(*first, *again);
  EXPECT_EQ(fleet.coordinator->Snapshot().participants.size(), 1u);
  EXPECT_EQ(fleet.Register("b", GroupRole::kTrainer, "trainer", 1, 2, 7).error().reason(),
            Reason::kDuplicateRank)
      << "the same incarnation behind another agent is not the same process";
}

TEST(CoordinatorMembership, PlaceIsFreeOnceTheAgentsSessionEnds) {
  Fleet fleet;
  const auto old = fleet.Register("a", GroupRole::kTrainer, "trainer", 0, 1, 7);
  fleet.coordinator->CloseSession(fleet.Agent("a").id());
  EXPECT_EQ(fleet.Register("b", GroupRole::kTrainer, "trainer", 0, 1, 7).error().reason(),
            Reason::kStaleIncarnation);
  const auto fresh = fleet.Register("b", GroupRole::kTrainer, "trainer", 0, 1, 8);
  ASSERT_TRUE(fresh.has_value());
  EXPECT_EQ(fresh->id, old->id);
  fleet.Run();
  EXPECT_FALSE(fleet.Agent("a").session_lost.has_value()) << "who closed is not called any more";
}

struct BadRegister {
  const char* name;
  std::function<void(control::RegisterRequest&)> spoil;
  Reason reason;
};
class CoordinatorRegister : public ::testing::TestWithParam<BadRegister> {};

TEST_P(CoordinatorRegister, IsRefusedAndChangesNothing) {
  Options options;
  options.members_max = 64;
  Fleet fleet(options);
  ASSERT_TRUE(fleet.Register("a", GroupRole::kTrainer, "trainer", 0, 4).has_value());
  control::RegisterRequest request;
  request.agent = fleet.Agent("a").id();
  request.job = "default";
  request.role = GroupRole::kEngine;
  request.group = "engine-a";
  request.rank = 0;
  request.world_size = 1;
  request.incarnation = Incarnation(5);
  GetParam().spoil(request);
  std::optional<Reason> reason;
  fleet.coordinator->Register(
      request, [&](const auto& reply) { reason = reply ? Reason::kNone : reply.error().reason(); });
  fleet.Run();
  EXPECT_EQ(reason, GetParam().reason);
  EXPECT_EQ(fleet.coordinator->Snapshot().participants.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(
    All, CoordinatorRegister,
    ::testing::Values(
        BadRegister{"RankOutsideOfTheWorld", [](auto& r) { r.rank = 1; }, Reason::kInvalidRequest},
        BadRegister{"WorldOfNobody", [](auto& r) { r.world_size = 0; }, Reason::kInvalidRequest},
        BadRegister{"WorldTooLarge", [](auto& r) { r.world_size = 65; }, Reason::kLimitExceeded},
        BadRegister{"TooManyInAll", [](auto& r) { r.world_size = 62; }, Reason::kLimitExceeded},
        BadRegister{"EmptyGroup", [](auto& r) { r.group = ""; }, Reason::kInvalidRequest},
        BadRegister{"LongGroup", [](auto& r) { r.group = std::string(129, 'x'); },
                    Reason::kInvalidRequest},
        BadRegister{"OtherJob", [](auto& r) { r.job = "other"; }, Reason::kInvalidRequest},
        BadRegister{"NoIncarnation", [](auto& r) { r.incarnation = {}; }, Reason::kInvalidRequest},
        BadRegister{"UnknownRole", [](auto& r) { r.role = static_cast<GroupRole>(9); },
                    Reason::kInvalidRequest},
        BadRegister{"RoleOfAnotherGroup",
                    [](auto& r) {
                      r.group = "trainer";
                      r.world_size = 4;
                    },
                    Reason::kInvalidRequest},
        BadRegister{"SecondTrainer", [](auto& r) { r.role = GroupRole::kTrainer; },
                    Reason::kInvalidRequest},
        BadRegister{"WorldSizesDisagree",
                    [](auto& r) {
                      r.role = GroupRole::kTrainer;
                      r.group = "trainer";
                      r.world_size = 5;
                      r.rank = 4;
                    },
                    Reason::kInvalidRequest},
        BadRegister{"AgentWithoutSession", [](auto& r) { r.agent = AgentId(77); },
                    Reason::kNotRegistered}),
    [](const auto& instance) { return std::string(instance.param.name); });

TEST(CoordinatorMembership, GroupMayComeBackWithAnotherWorldSize) {
  Fleet fleet;
  const auto old = fleet.Trainer(2);
  EXPECT_TRUE(fleet.coordinator->Evict("trainer", "resize").ok());
  fleet.Run();
  EXPECT_EQ(fleet.Agent("trainer-agent").All<epoch::EvictCommand>().size(), 2u);
  const auto fresh = fleet.Trainer(3);
  fleet.Engine("engine-a");
  fleet.PublishAll(fresh, 1);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_EQ(fleet.coordinator->Evict("nobody", "x").reason(), Reason::kNotRegistered);
}

TEST(CoordinatorMembership, AMemberOfAGroupOfAllPlacesTakesOne) {
  Options options;
  options.members_max = 16;
  Fleet fleet(options);
  ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, "huge", 0, 16).has_value());
  for (uint32_t i = 0; i < 15; ++i) {
    const std::string name = "engine-" + std::to_string(i);
    EXPECT_TRUE(fleet.Register(i < 8 ? "b" : "c", GroupRole::kEngine, name, 0, 1).has_value()) << i;
  }
  const auto more = fleet.Register("d", GroupRole::kEngine, "engine-15", 0, 1);
  ASSERT_FALSE(more.has_value()) << "16 ranks are here";
  EXPECT_EQ(more.error().reason(), Reason::kLimitExceeded);
}

TEST(CoordinatorMembership, NeitherDeclaringNorTakingPlacesKeepsAnotherAgentOut) {
  Options options;
  options.members_max = 16;
  Fleet fleet(options);
  fleet.Agent("b");
  ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, "huge", 0, 16).has_value());
  EXPECT_EQ(fleet.Register("a", GroupRole::kEngine, "also-huge", 0, 16).error().reason(),
            Reason::kLimitExceeded);
  uint32_t taken = 1;
  while (fleet.Register("a", GroupRole::kEngine, "huge", taken, 16).has_value()) ++taken;
  EXPECT_EQ(taken, 8u) << "half of the places";
  for (uint32_t rank = 0; rank < 8; ++rank) {
    EXPECT_TRUE(fleet.Register("b", GroupRole::kTrainer, "trainer", rank, 8).has_value()) << rank;
  }
  EXPECT_TRUE(fleet.coordinator->Evict("huge", "test").ok());
  EXPECT_TRUE(fleet.Register("b", GroupRole::kEngine, "engine", 0, 1).error().reason() ==
              Reason::kLimitExceeded)
      << "its own half is full";
  EXPECT_TRUE(fleet.Register("c", GroupRole::kEngine, "engine", 0, 8).has_value());
}

TEST(CoordinatorMembership, AnAgentThatIsAloneMayTakeAllPlaces) {
  Options options;
  options.members_max = 16;
  Fleet fleet(options);
  for (uint32_t rank = 0; rank < 16; ++rank) {
    EXPECT_TRUE(fleet.Register("a", GroupRole::kTrainer, "trainer", rank, 16).has_value()) << rank;
  }
}

TEST(CoordinatorMembership, EnginesThatLeftAreForgotten) {
  Fleet fleet;
  fleet.Engine("engine-that-stays");
  auto rows = [&fleet] { return fleet.coordinator->Snapshot().engines.size(); };
  for (int i = 0; i < 4'000; ++i) {
    const std::string name = "engine-" + std::to_string(i);
    ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, name, 0, 1).has_value()) << i;
    EXPECT_TRUE(fleet.coordinator->Evict(name, "it leaves").ok());
  }
  fleet.Run(seconds(5));
  EXPECT_EQ(rows(), 65u) << "the one that is here, and the newest that left";
  EXPECT_EQ(fleet.metrics.Value("engines_forgotten_total"), 4'000 - 64);
  EXPECT_EQ(fleet.coordinator->Snapshot().engines_forgotten, 4'000u - 64);
  EXPECT_TRUE(fleet.Register("a", GroupRole::kEngine, "engine-3999", 0, 1).has_value());
  fleet.Run(std::chrono::hours(1));
  ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, "engine-b", 0, 1).has_value());
  fleet.Run(seconds(5));
  EXPECT_EQ(rows(), 3u) << "none that left an hour ago";
}

TEST(CoordinatorMembership, DeadGroupsMakeRoom) {
  Options options;
  options.members_max = 8;
  Fleet fleet(options);
  for (int i = 0; i < 20; ++i) {
    const std::string name = "engine-" + std::to_string(i);
    ASSERT_TRUE(fleet.Register("a", GroupRole::kEngine, name, 0, 4).has_value()) << i;
    EXPECT_TRUE(fleet.coordinator->Evict(name, "test").ok());
  }
}

TEST(CoordinatorSession, ChecksTheProtocolAndTheJob) {
  Fleet fleet;
  struct Case {
    std::function<void(control::AgentHello&)> spoil;
    Reason reason;
  };
  const std::vector<Case> cases = {
      {[](auto& h) { h.protocol_min = h.protocol_max = 2; }, Reason::kProtocolVersion},
      {[](auto& h) { h.protocol_min = h.protocol_max = 0; }, Reason::kProtocolVersion},
      {[](auto& h) { h.job = "other"; }, Reason::kInvalidRequest},
      {[](auto& h) { h.incarnation = {}; }, Reason::kInvalidRequest},
      {[](auto& h) { h.name = std::string(200, 'n'); }, Reason::kInvalidRequest},
  };
  FakeAgent port(fleet, "port");
  for (const Case& wrong : cases) {
    control::AgentHello hello;
    hello.job = "default";
    hello.incarnation = Incarnation(3);
    wrong.spoil(hello);
    std::optional<Reason> reason;
    fleet.coordinator->OpenSession(hello, &port, [&](const auto& reply) {
      reason = reply ? Reason::kNone : reply.error().reason();
    });
    fleet.Run();
    EXPECT_EQ(reason, wrong.reason);
  }
  EXPECT_EQ(fleet.coordinator->Snapshot().agents, 0u);
}

TEST(CoordinatorSession, NewerSessionOfTheSameAgentReplacesTheOld) {
  Fleet fleet;
  FakeAgent first(fleet, "first");
  FakeAgent second(fleet, "second");
  first.incarnation = second.incarnation = Incarnation(55);
  ASSERT_TRUE(first.Open(false).has_value());
  const AgentId id = first.id();
  ASSERT_TRUE(first.Open(false).has_value());
  EXPECT_EQ(first.id(), id) << "repeated: the same answer";
  ASSERT_TRUE(second.Open(false).has_value());
  EXPECT_NE(second.id(), id);
  EXPECT_EQ(first.session_lost->reason(), Reason::kStaleIncarnation);
  EXPECT_EQ(fleet.coordinator->Snapshot().agents, 1u);
}

TEST(CoordinatorSession, HeartbeatOfAnUnknownSessionIsFenced) {
  Fleet fleet;
  fleet.coordinator->Heartbeat(AgentId(99), {});
  EXPECT_EQ(fleet.metrics.Value("fenced_requests_total{cause=stale_session}"), 1);
}

TEST(CoordinatorSession, AgentMayCloseWhileTheEndIsOnItsWay) {
  Fleet fleet;
  auto agent = std::make_unique<FakeAgent>(fleet, "short-lived");
  ASSERT_TRUE(agent->Open(false).has_value());
  bool done = false;
  fleet.coordinator->Shutdown([&](const Status&) { done = true; });
  fleet.coordinator->CloseSession(agent->id());
  agent.reset();
  fleet.Run();
  EXPECT_TRUE(done);
}

TEST(CoordinatorSession, D15LeasesThatEndTogetherLeaveTimeForOthersInBetween) {
  constexpr size_t kAgents = 1'000, kInOneTask = 256;
  Fleet fleet;
  for (size_t i = 0; i < kAgents; ++i) {
    fleet.Agent("agent-" + std::to_string(i)).StopHeartbeats();
  }
  const Nanos end = fleet.sim.Now() + fleet.options.lease + 2 * fleet.options.heartbeat;
  size_t here = kAgents, most = 0, parts = 0;
  while (here > 0 && fleet.sim.Now() <= end) {
    ASSERT_TRUE(fleet.sim.RunOne());
    const size_t left = fleet.coordinator->Snapshot().agents;
    parts += left < here;
    most = std::max(most, here - left);
    here = left;
  }
  EXPECT_EQ(here, 0u) << "all end in time all the same";
  EXPECT_LE(most, kInOneTask);
  EXPECT_GE(parts, kAgents / kInOneTask);
  fleet.Run();
  for (const auto& [name, agent] : fleet.agents) EXPECT_TRUE(agent->session_lost) << name;
}

TEST(CoordinatorSession, NobodyIsWokenMoreOftenThanTheHeartbeat) {
  Fleet fleet;
  FakeAgent agent(fleet, "silent");
  ASSERT_TRUE(agent.Open(false).has_value());
  const size_t before = fleet.sim.tasks_run();
  fleet.Run(seconds(10));
  EXPECT_TRUE(agent.session_lost.has_value());
  EXPECT_LE(fleet.sim.tasks_run() - before, 10u);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
