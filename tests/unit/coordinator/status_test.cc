#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "server/coordinator/waiting_words.h"
#include "server/plan/plan.h"
#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::HasSubstr;

TEST(CoordinatorStatus, ListsParticipants) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  ASSERT_TRUE(fleet.Register("e", control::GroupRole::kEngine, "engine-a", 1, 2).has_value());
  const StatusSnapshot status = fleet.coordinator->Snapshot();
  EXPECT_EQ(status.agents, 2u);
  ASSERT_EQ(status.participants.size(), 3u);
  const ParticipantStatus& engine = status.participants[0];
  EXPECT_EQ(engine.group, "engine-a");
  EXPECT_EQ(engine.rank, 1u);
  EXPECT_FALSE(engine.has_layout);
  const ParticipantStatus& rank = status.participants[2];
  EXPECT_EQ(rank.member, trainer[1]);
  EXPECT_EQ(rank.agent_name, "trainer-agent");
  EXPECT_EQ(rank.pid, 4242);
  EXPECT_TRUE(rank.has_layout);
  EXPECT_EQ(rank.tensors, 2u);
  EXPECT_EQ(rank.bytes, 4 * 3 * 4 + 3 * 2) << "rows 3 … 6 of a, 2 … 4 of b";
  EXPECT_EQ(status.engines.at(0).state, EngineState::kIncomplete);
  EXPECT_EQ(status.engines[0].ranks_present, 1u);
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("members{role=trainer,state=ready}"), 2);
  EXPECT_EQ(fleet.metrics.Value("members{role=engine,state=registered}"), 1);
}

TEST(CoordinatorStatus, LeavesOffTheOldestEpochsWhereTheyNameTooManyEngines) {
  Options options;
  options.status_names_max = 5;
  Fleet fleet(options);
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  for (uint64_t version = 1; version <= 4; ++version) {
    fleet.PublishAll(trainer, version);
    fleet.Run();
  }
  std::vector<EpochStatus> epochs = fleet.coordinator->Snapshot().epochs;
  ASSERT_EQ(epochs.size(), 2u) << "of two engines each";
  EXPECT_EQ(epochs[0].version, Version(4));
  EXPECT_EQ(epochs[1].version, Version(3));
  EXPECT_TRUE(fleet.coordinator->Describe(epochs[1].epoch).has_value());
}

TEST(CoordinatorStatus, PagesHaveEveryEpochOnceWhileEpochsAreAdded) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  uint64_t version = 0;
  const auto publish = [&] {
    fleet.PublishAll(trainer, ++version);
    fleet.Run();
  };
  while (version < 8) publish();
  const std::vector<EpochStatus> before = fleet.coordinator->Snapshot().epochs;
  ASSERT_EQ(before.size(), 8u);
  StatusQuery query{.epochs_max = 3};
  std::vector<Epoch> paged;
  std::vector<size_t> left;
  do {
    const StatusSnapshot page = fleet.coordinator->Snapshot(query);
    const bool further = query.epochs_before != Epoch{};
    EXPECT_EQ(page.engines.size(), further ? 0u : 1u);
    EXPECT_EQ(page.participants.size(), further ? 0u : 2u);
    EXPECT_EQ(page.participants_total, 2u);
    for (const EpochStatus& epoch : page.epochs) paged.push_back(epoch.epoch);
    left.push_back(page.epochs_left);
    query.epochs_before = paged.back();
    publish();
  } while (left.back() > 0);
  EXPECT_THAT(left, ::testing::ElementsAre(5, 2, 0));
  std::vector<Epoch> all;
  for (const EpochStatus& epoch : before) all.push_back(epoch.epoch);
  EXPECT_EQ(paged, all);
}

TEST(CoordinatorStatus, EpochsOfTheSameEnginesShareTheirNames) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  for (uint64_t version = 1; version <= 4; ++version) {
    if (version == 4) fleet.Engine("engine-c");
    fleet.PublishAll(trainer, version);
    fleet.Run();
  }
  std::map<size_t, std::set<const void*>> lists;
  for (const EpochStatus& epoch : fleet.coordinator->Snapshot().epochs) {
    if (epoch.kind == epoch::Kind::kPublish) lists[epoch.engines.size()].insert(epoch.engines.id());
  }
  ASSERT_EQ(lists.size(), 2u);
  EXPECT_EQ(lists[2].size(), 1u) << "of three epochs";
  EXPECT_EQ(lists[3].size(), 1u);
}

TEST(CoordinatorStatus, HasTheRanksThatAreWaitedForAmongTheFirstOnes) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a", 2);
  fleet.Engine("engine-b", 2);
  fleet.Agent("engine-b-agent").deaf = [](const epoch::Command&) { return true; };
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  const auto names = [&](const StatusQuery& query) {
    std::vector<std::string> out;
    const StatusSnapshot status = fleet.coordinator->Snapshot(query);
    EXPECT_EQ(status.participants_total, 6u);
    EXPECT_EQ(status.trainers_total, 2u);
    for (const ParticipantStatus& p : status.participants) {
      out.push_back(p.group + "/" + std::to_string(p.rank));
    }
    return out;
  };
  EXPECT_EQ(names({}).size(), 6u);
  EXPECT_EQ(names({.participants_max = 0}).size(), 0u);
  EXPECT_THAT(names({.participants_max = 1}),
              ::testing::ElementsAre("engine-a/0", "engine-b/0", "engine-b/1", "trainer/0"));
}

TEST(CoordinatorStatus, OfWhatAnEpochWaitsForTheFirstLinesAreTold) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a", 7);
  fleet.Agent("engine-a-agent").deaf = [](const epoch::Command&) { return true; };
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  const StatusSnapshot status = fleet.coordinator->Snapshot({.lines_max = 2});
  EXPECT_THAT(status.epochs.at(0).waiting_for,
              ::testing::ElementsAre("engine-a/0: prepared", "engine-a/1: prepared"));
  EXPECT_EQ(status.epochs.at(0).waiting_for_left, 5u);
  EXPECT_THAT(status.waiting_for, ::testing::EndsWith("engine-a/3: prepared and 3 more"));
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.at(0).waiting_for.size(), 7u);
}

TEST(CoordinatorStatus, RunningEpochSaysWhatItWaitsFor) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a", 2);
  fleet.Agent("engine-a-agent").deaf = [](const epoch::Command&) { return true; };
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for,
            "epoch 1 (version 3) preparing: engine-a/0: prepared, engine-a/1: prepared");
}

TEST(CoordinatorStatus, WhoHoldsUpATransferIsNamedBeforeItsSources) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(5);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  fleet.Agent("trainer-agent").deaf =
      fleet.Agent("engine-b-agent").deaf = [](const epoch::Command& command) {
        return std::holds_alternative<epoch::TransferCommand>(command);
      };
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  EXPECT_THAT(
      fleet.coordinator->Snapshot().waiting_for,
      ::testing::StartsWith("epoch 1 (version 3) transferring: engine-b/0: staged, trainer/"));
}

TEST(CoordinatorStatus, WhoseAgentIsSilentIsNamedFirst) {
  Options options;
  options.lease = std::chrono::seconds(60);
  Fleet fleet(options);
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a", 5);
  fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").StopHeartbeats();
  fleet.Run(std::chrono::seconds(4));
  StatusSnapshot status = fleet.coordinator->Snapshot();
  EXPECT_EQ(status.waiting_for, "engine-b/0: silent") << "also while nothing is published";
  for (const ParticipantStatus& p : status.participants) {
    EXPECT_EQ(p.silent_seconds > 2, p.group == "engine-b") << p.group;
  }
  for (const char* agent : {"engine-a-agent", "engine-b-agent"}) {
    fleet.Agent(agent).deaf = [](const epoch::Command&) { return true; };
  }
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  status = fleet.coordinator->Snapshot();
  EXPECT_THAT(
      status.waiting_for,
      ::testing::StartsWith("epoch 1 (version 3) preparing: engine-b/0: prepared, engine-a"));
  EXPECT_EQ(status.epochs.at(0).waiting_for.at(0), "engine-b/0: prepared");
}

TEST(CoordinatorStatus, AProcessThatItsAgentSeesStoppedAndOneThatItRefusedAreNamedFirst) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a", 5);
  const auto engine = fleet.Engine("engine-b");
  ASSERT_TRUE(fleet.Register("c", control::GroupRole::kEngine, "engine-c", 0, 2).has_value());
  fleet.Run(std::chrono::seconds(2));
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "engine-c/0: layout, engine-c/1: register");
  FakeAgent& agent = fleet.Agent("engine-b-agent");
  agent.troubles = {{engine[0], "its process 7 is stopped", "kill -CONT 7"},
                    {trainer[0], "is another agent's", ""},
                    {{}, "refused a process of uid 9", "the same user"}};
  size_t told = 0;
  fleet.coordinator->Watch([&told] { ++told; });
  fleet.Run(std::chrono::seconds(2));
  EXPECT_EQ(told, 1u) << "what stays as it is, is told once";
  StatusSnapshot status = fleet.coordinator->Snapshot();
  EXPECT_EQ(status.waiting_for,
            "engine-b/0: its process 7 is stopped, engine-b-agent: refused a process of uid 9");
  ASSERT_EQ(status.troubles.size(), 2u);
  EXPECT_EQ(status.troubles[0].where, "engine-b/0");
  EXPECT_EQ(status.troubles[0].agent_name, "engine-b-agent");
  EXPECT_EQ(status.troubles[0].remedy, "kill -CONT 7");
  for (const char* deaf : {"engine-a-agent", "engine-b-agent"}) {
    fleet.Agent(deaf).deaf = [](const epoch::Command&) { return true; };
  }
  fleet.PublishAll(trainer, 3);
  fleet.Run();
  EXPECT_EQ(fleet.Newest().waiting_for.at(0), "engine-b/0: prepared");
  agent.troubles.clear();
  fleet.Run(std::chrono::seconds(2));
  EXPECT_TRUE(fleet.coordinator->Snapshot().troubles.empty());
}

class CoordinatorProgress : public ::testing::Test {
 protected:
  /// engine-b has all; engine-a receives, and nobody has said how far it is.
  void SetUp() override {
    const auto trainer = fleet.Trainer(1);
    slow = fleet.Engine("engine-a")[0];
    done = fleet.Engine("engine-b")[0];
    agent().deaf = [](const epoch::Command& command) {
      return std::holds_alternative<epoch::TransferCommand>(command);
    };
    fleet.PublishAll(trainer, 3);
    fleet.Run();
    ASSERT_EQ(fleet.Newest().phase, epoch::Phase::kTransferring);
  }
  FakeAgent& agent() { return fleet.Agent("engine-a-agent"); }
  EpochStatus AfterSaying(std::vector<control::Receiving> receiving) {
    agent().receiving = std::move(receiving);
    fleet.Run(std::chrono::seconds(2));
    return fleet.Newest();
  }

  Fleet fleet;
  epoch::Member slow, done;
  /// Of two equal engines; one engine's bytes are the model's: 7 x 3 of 4 bytes, 5 of 2.
  static constexpr int64_t kEach = 7 * 3 * 4 + 5 * 2;
};

TEST_F(CoordinatorProgress, WhatHasArrivedIsCountedWhileAnEpochMoves) {
  const Epoch moving = fleet.Newest().epoch;
  const EpochStatus status = AfterSaying({{slow, Epoch(moving.value + 1), 100},  // of another epoch
                                          {slow, moving, 7},
                                          {done, moving, 100},  // has reported its bytes
                                          {{ParticipantId(999), Incarnation(1)}, moving, 100}});
  EXPECT_EQ(status.bytes_done, kEach + 7);
  EXPECT_EQ(status.bytes_total, 2 * kEach);
  EXPECT_EQ(status.bytes, kEach) << "it counts what was verified";
  EXPECT_EQ(AfterSaying({{slow, moving, int64_t{1} << 60}}).bytes_done, 2 * kEach)
      << "no more than there is";
  ASSERT_TRUE(fleet.coordinator->Abort(moving, "enough").ok());
  fleet.Run();
  EXPECT_EQ(fleet.Newest().bytes_total, 0) << "it has ended";
}

TEST_F(CoordinatorProgress, IsToldToWhoWatchesOnceASecondAndWhileItGrows) {
  const Epoch moving = fleet.Newest().epoch;
  size_t told = 0;
  fleet.coordinator->Watch([&told] { ++told; });
  for (int64_t bytes : {1, 2, 3}) AfterSaying({{slow, moving, bytes}});
  EXPECT_EQ(told, 3u);
  fleet.Run(std::chrono::seconds(5));
  EXPECT_EQ(told, 3u) << "what stays as it is, is told once";
}

TEST_F(CoordinatorProgress, IsUnknownWhileAnAgentDoesNotSay) {
  const Epoch moving = fleet.Newest().epoch;
  EXPECT_EQ(fleet.Newest().bytes_total, 0) << "as with an agent of an earlier release";
  EXPECT_EQ(fleet.Newest().bytes_done, 0);
  EXPECT_EQ(AfterSaying({{slow, moving, 0}}).bytes_total, 2 * kEach) << "nothing yet, it says";
  EXPECT_EQ(AfterSaying({}).bytes_total, 0);
}

TEST(WaitingWords, SayWhatAMemberStillDoes) {
  EXPECT_EQ(WaitingInWords("epoch 1 (version 3) transferring: engine-b/0: staged, trainer/0: "
                           "sourced and 2 more"),
            "epoch 1 (version 3) transferring: engine-b/0 still receiving, trainer/0 still being "
            "read and 2 more");
  EXPECT_EQ(WaitingInWords("version 2: trainer/1: publish"),
            "version 2: trainer/1 has not published");
  EXPECT_EQ(WaitingInWords("operator: commit"), "operator must commit");
  EXPECT_EQ(WaitingInWords("a/0: suspect, b/1: absent and 2 more"),
            "a/0 is cut off: its agent's connection ended, b/1 is cut off: its agent's connection "
            "and its lease ended and 2 more");
  for (const char* as_it_is :
       {"", "nobody", "engine-a: staged bytes were lost", "an operator: the journal failed: full",
        "refused: a process of uid 9: "}) {
    EXPECT_EQ(WaitingInWords(as_it_is), as_it_is);
  }
}

TEST(CoordinatorStatus, GroupsThatAreThereInPartAreWaitedFor) {
  Fleet fleet;
  ASSERT_TRUE(fleet.Register("e", control::GroupRole::kEngine, "engine-a", 1, 2).has_value());
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "engine-a/0: register, engine-a/1: layout");
  const auto first = fleet.Register("t", control::GroupRole::kTrainer, "trainer", 0, 2);
  ASSERT_TRUE(first.has_value() && fleet.SubmitRows(*first, 0, 2).ok());
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "trainer/1: register");
  EXPECT_TRUE(fleet.Publish(*first, 1).ok());
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for, "version 1: trainer/1: register");
}

TEST(CoordinatorStatus, WatchersHearOfEveryKindOfChangeOnce) {
  Fleet fleet;
  int calls = 0;
  const uint64_t id = fleet.coordinator->Watch([&] { ++calls; });
  fleet.Agent("a");
  fleet.Run();
  EXPECT_GT(calls, 0);
  const int before = calls;
  fleet.Run(std::chrono::seconds(10));
  EXPECT_EQ(calls, before) << "no change, no call";
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  const int joined = calls;
  EXPECT_GT(joined, before);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  EXPECT_GT(calls, joined);
  fleet.coordinator->Unwatch(id);
  const int last = calls;
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  EXPECT_EQ(calls, last);
}

TEST(CoordinatorStatus, ExplainsPlans) {
  Fleet fleet;
  EXPECT_EQ(fleet.coordinator->Explain("", "").error().reason(), Reason::kNotRegistered);
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const auto all = fleet.coordinator->Explain("", "");
  ASSERT_TRUE(all.has_value());
  EXPECT_THAT(*all, HasSubstr("engine-a:"));
  EXPECT_THAT(*all, HasSubstr("engine-b: the same plan as engine-a"));
  EXPECT_TRUE(fleet.coordinator->Explain("engine-b", "a").has_value());
  EXPECT_EQ(fleet.coordinator->Explain("engine-b", "zz").error().reason(), Reason::kTensorMissing);
  EXPECT_EQ(fleet.coordinator->Explain("engine-x", "").error().reason(), Reason::kNotRegistered);
}

TEST(CoordinatorStatus, SlicesAreFetchedByPlanSideAndRank) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a", 3);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const PlanId plan = fleet.Newest().plans.at(0);
  auto fetch = [&](PlanId id, plan::Side side, uint32_t rank) {
    std::optional<Result<std::shared_ptr<const plan::RankSlice>>> answer;
    fleet.coordinator->FetchSlice(id, side, rank, [&](auto slice) { answer = std::move(slice); });
    fleet.Run();
    return *answer;
  };
  const auto known = fleet.coordinator->FindPlan(plan);
  ASSERT_TRUE(known.has_value());
  const auto slice = fetch(plan, plan::Side::kTarget, 2);
  ASSERT_TRUE(slice.has_value());
  EXPECT_EQ(**slice, plan::SliceOf(**known, plan::Side::kTarget, 2));
  EXPECT_EQ(fetch(plan, plan::Side::kSource, 2).error().reason(), Reason::kInvalidRequest);
  EXPECT_EQ(fetch(PlanId{1, 1}, plan::Side::kSource, 0).error().reason(), Reason::kNotRegistered);
  EXPECT_EQ(fleet.coordinator->FindPlan(PlanId{1, 1}).error().reason(), Reason::kNotRegistered);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
