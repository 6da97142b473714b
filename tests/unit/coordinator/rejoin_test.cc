#include "server/coordinator/rejoin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr epoch::Content kOld{Epoch(4), Version(40)}, kNew{Epoch(7), Version(70)};
const CommitRecord kCommitted{kNew.epoch, kNew.version, {"engine-a"}};

control::RejoinState Serves(epoch::Content content) {
  control::RejoinState claim;
  claim.serving = content;
  return claim;
}
control::RejoinState Staged(uint64_t epoch, epoch::Content serving = kOld, bool told = false) {
  control::RejoinState claim = Serves(serving);
  claim.staged = claim.content = Epoch(epoch);
  claim.told = told;
  return claim;
}

TEST(Rejoin, EngineServesWhatAllItsRanksServe) {
  for (const epoch::Content& content : {kOld, kNew, epoch::Content{}}) {
    const auto rejoined = Rejoin({Serves(content), Serves(content)}, kCommitted);
    ASSERT_TRUE(rejoined.has_value());
    EXPECT_EQ(*rejoined, (RejoinResult{content, {}, {}, {}}));
  }
}

TEST(Rejoin, WhatIsDecidedGoesOnWithItsSwap) {
  for (const bool told : {false, true}) {
    const auto rejoined = Rejoin({Staged(7), Staged(7, kOld, told)}, kCommitted);
    ASSERT_TRUE(rejoined.has_value());
    EXPECT_EQ(*rejoined, (RejoinResult{kOld, Epoch(7), {}, {}, kNew}));
  }
}

TEST(Rejoin, ADecidedFillGoesOnUnderItsOwnNumber) {
  control::RejoinState fill = Staged(9);
  fill.content = kNew.epoch;
  EXPECT_EQ(Rejoin({fill}, kCommitted)->unfinished, Epoch(9));
}

TEST(Rejoin, ASwapThatOneRankHasMadeIsMadeByAll) {
  const auto rejoined = Rejoin({Serves(kNew), Staged(7, kOld, true), Staged(7)}, kCommitted);
  ASSERT_TRUE(rejoined.has_value());
  EXPECT_EQ(*rejoined, (RejoinResult{kNew, {}, {1, 2}, {}, kNew}));
}

TEST(Rejoin, WhatNobodyDecidedIsAborted) {
  const auto all = Rejoin({Staged(8), Staged(8)}, kCommitted);
  ASSERT_TRUE(all.has_value());
  EXPECT_EQ(*all, (RejoinResult{kOld, {}, {}, {0, 1}}));
  const auto some = Rejoin({Serves(kOld), Staged(8)}, kCommitted);
  ASSERT_TRUE(some.has_value());
  EXPECT_EQ(*some, (RejoinResult{kOld, {}, {}, {1}}));
}

TEST(Rejoin, AFillThatOneRankHasStagedIsAborted) {
  control::RejoinState fill = Staged(9);
  fill.content = kNew.epoch;
  const auto rejoined = Rejoin({fill, Serves(kOld)}, kCommitted);
  ASSERT_TRUE(rejoined.has_value());
  EXPECT_EQ(*rejoined, (RejoinResult{kOld, {}, {}, {0}}));
}

TEST(Rejoin, WhatIsOlderThanTheCommittedEpochIsLeftToTheNextOne) {
  const auto rejoined = Rejoin({Staged(6), Staged(6)}, kCommitted);
  ASSERT_TRUE(rejoined.has_value());
  EXPECT_EQ(*rejoined, (RejoinResult{kOld, {}, {}, {}}));
}

TEST(Rejoin, RefusesWhatDoesNotFit) {
  struct Case {
    std::vector<control::RejoinState> claims;
    CommitRecord committed;
    const char* says;
  };
  const std::vector<Case> cases = {
      {{Serves(kOld), Serves(kNew)}, kCommitted, "different epochs"},
      {{Serves(kOld), Serves({})},
       kCommitted,
       "different epochs: epoch 4 (version 40) and nothing"},
      {{Serves({Epoch(8), Version(80)})}, kCommitted, "never committed here"},
      {{Serves({Epoch(7), Version(71)})}, kCommitted, "never committed here"},
      {{Serves(kOld)}, CommitRecord{}, "never committed here; committed is nothing"},
      {{Staged(6, kOld, true)}, kCommitted, "changing to epoch 6"},
      {{Staged(7, kOld, true), Serves(kOld)}, kCommitted, "changing to epoch 7"},
      {{Staged(8, kOld, true)}, kCommitted, "changing to epoch 8"},
  };
  for (const Case& c : cases) {
    const auto rejoined = Rejoin(c.claims, c.committed);
    ASSERT_FALSE(rejoined.has_value()) << c.says;
    EXPECT_EQ(rejoined.error().reason(), Reason::kStaleEpoch);
    EXPECT_THAT(rejoined.error().message(), HasSubstr(c.says));
  }
}

/// One engine of two ranks; the coordinator is lost, and everyone comes back with a claim.
class CoordinatorRejoin : public ::testing::Test {
 protected:
  CoordinatorRejoin() {
    trainer_ = fleet_.Trainer(2);
    engine_ = fleet_.Engine("engine-a", 2);
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
  }
  void Restart() {
    fleet_.Restart();
    for (auto& [name, agent] : fleet_.agents) {
      agent->deaf = nullptr;
      agent->commands.clear();
      ASSERT_TRUE(agent->Open().has_value());
    }
  }
  Result<epoch::Member> RegisterAgain(control::GroupRole role, const std::string& group,
                                      const epoch::Member& before, uint32_t rank,
                                      const control::RejoinState& claim) {
    return fleet_.Register(group + "-agent", role, group, rank, 2, before.incarnation.value, claim);
  }
  /// In reverse order, so that numbers change hands.
  void Rejoin(control::GroupRole role, const std::string& group,
              std::vector<epoch::Member>& members,
              const std::vector<control::RejoinState>& claims) {
    for (uint32_t rank = 2; rank-- > 0;) {
      const auto again = RegisterAgain(role, group, members[rank], rank, claims[rank]);
      ASSERT_TRUE(again.has_value()) << again.error().ToString();
      members[rank] = *again;
      ASSERT_TRUE(fleet_.SubmitRows(*again, rank, 2).ok());
    }
    fleet_.Run();
  }
  void RejoinEngine(const std::vector<control::RejoinState>& claims) {
    Rejoin(control::GroupRole::kEngine, "engine-a", engine_, claims);
  }
  void RejoinTrainer(Version released = {}) {
    control::RejoinState claim;
    claim.released = released;
    Rejoin(control::GroupRole::kTrainer, "trainer", trainer_, {claim, claim});
  }
  /// Where the newest reservation is in the journal.
  size_t ReservedAt() const {
    size_t at = 0;
    for (size_t i = 0; i < fleet_.journal.durable().size(); ++i) {
      if (std::holds_alternative<ReserveRecord>(fleet_.journal.durable()[i])) at = i;
    }
    return at;
  }
  FakeAgent& EngineAgent() { return fleet_.Agent("engine-a-agent"); }
  control::RejoinState Serving(uint64_t version) {
    return Serves({fleet_.coordinator->Snapshot().committed, Version(version)});
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_, engine_;
};

TEST_F(CoordinatorRejoin, EnginesServeOnAndTheTrainerGoesOn) {
  Publish(1);
  Publish(2);
  control::RejoinState claim = Serving(2);
  claim.holds = {{Epoch(1), Version(1)}};
  Restart();
  RejoinTrainer(Version(2));
  RejoinEngine({claim, claim});
  const EngineStatus engine = fleet_.EngineNamed("engine-a");
  EXPECT_EQ(engine.state, EngineState::kServing);
  EXPECT_EQ(engine.serving, claim.serving.epoch);
  EXPECT_EQ(engine.version, Version(2));
  EXPECT_TRUE(engine.ready);
  EXPECT_EQ(engine.held, claim.holds) << "a rollback is possible as before";
  EXPECT_THAT(EngineAgent().commands, IsEmpty()) << "it is not troubled";
  EXPECT_EQ(fleet_.metrics.Value("engines_recalled_total{outcome=kept}"), 1);
  EXPECT_EQ(fleet_.Publish(trainer_[0], 2).reason(), Reason::kStaleVersion);
  Publish(3);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(3));
}

TEST_F(CoordinatorRejoin, WhatAllRanksOfAnEngineHoldCanBeGoneBackToAfterTheRestart) {
  for (uint64_t version = 1; version <= 4; ++version) Publish(version);
  control::RejoinState claim = Serving(4);
  claim.holds = {{Epoch(3), Version(3)}, {Epoch(2), Version(2)}, {Epoch(1), Version(1)}};
  control::RejoinState other = claim;
  other.holds.erase(other.holds.begin() + 1);
  Restart();
  RejoinTrainer(Version(4));
  RejoinEngine({claim, other});
  EXPECT_EQ(fleet_.EngineNamed("engine-a").held, other.holds);
  std::optional<Result<RolledBack>> answer;
  fleet_.coordinator->Rollback(Version(1), [&](auto result) { answer = result; });
  fleet_.Run();
  ASSERT_TRUE(answer.has_value() && answer->has_value());
  EXPECT_EQ((**answer).held, Epoch(1));
}

TEST_F(CoordinatorRejoin, ARollbackThatIsDecidedGoesOnAndItsBufferIsNotHeldTwice) {
  for (uint64_t version = 1; version <= 3; ++version) Publish(version);
  EngineAgent().retain = 2;
  Publish(4);
  const control::RejoinState before = Serving(4);
  EngineAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  fleet_.coordinator->Rollback(Version(3), [](const auto&) {});
  fleet_.Run(std::chrono::milliseconds(100));
  const Epoch decided = fleet_.coordinator->Snapshot().committed;
  ASSERT_GT(decided, before.serving.epoch);
  Restart();
  control::RejoinState claim = Staged(decided.value, before.serving);
  claim.holds = {{Epoch(3), Version(3)}, {Epoch(2), Version(2)}};
  RejoinEngine({claim, claim});
  const EngineStatus engine = fleet_.EngineNamed("engine-a");
  EXPECT_EQ(engine.serving, decided);
  EXPECT_EQ(engine.version, Version(3));
  EXPECT_EQ(engine.held, (epoch::Contents{before.serving, {Epoch(2), Version(2)}}));
}

TEST_F(CoordinatorRejoin, ADecidedVersionIsSwappedInAfterTheRestart) {
  Publish(1);
  const control::RejoinState before = Serving(1);
  EngineAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  Publish(2);
  const Epoch decided = fleet_.coordinator->Snapshot().committed;
  ASSERT_GT(decided, before.serving.epoch);
  Restart();
  RejoinEngine(
      {Staged(decided.value, before.serving, true), Staged(decided.value, before.serving)});
  const EngineStatus engine = fleet_.EngineNamed("engine-a");
  EXPECT_EQ(engine.serving, decided);
  EXPECT_EQ(engine.version, Version(2));
  EXPECT_EQ(engine.held, epoch::Contents{before.serving});
  EXPECT_EQ(EngineAgent().All<epoch::CommitCommand>().size(), 2u);
  EXPECT_EQ(EngineAgent().All<epoch::CommittedEverywhereCommand>().size(), 2u);
  RejoinTrainer(Version(1));
  EXPECT_EQ(fleet_.Publish(trainer_[0], 2).reason(), Reason::kStaleVersion) << "it is committed";
  Publish(3);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(3));
}

TEST_F(CoordinatorRejoin, AnUnfinishedVersionKeepsItsNameWhenANewerOneIsCommittedFirst) {
  std::vector<epoch::Member> other = fleet_.Engine("engine-b", 2);
  Publish(1);
  const control::RejoinState before = Serving(1);
  EngineAgent().deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::CommitCommand>(command);
  };
  Publish(2);
  const control::RejoinState now = Serving(2);
  Restart();
  RejoinTrainer(Version(2));
  Rejoin(control::GroupRole::kEngine, "engine-b", other, {now, now});
  bool held = true;
  fleet_.Agent("engine-b-agent").deaf = [&](const epoch::Command& command) {
    return held && std::holds_alternative<epoch::PrepareCommand>(command);
  };
  Publish(3);
  const control::RejoinState staged = Staged(now.serving.epoch.value, before.serving);
  // While version 3 is prepared without it, the engine comes back with version 2.
  auto again = engine_;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    again[rank] =
        *RegisterAgain(control::GroupRole::kEngine, "engine-a", engine_[rank], rank, staged);
    ASSERT_TRUE(fleet_.SubmitRows(again[rank], rank, 2).ok());
  }
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2)) << "does not wait";
  held = false;
  const Epoch newer = fleet_.Newest().epoch;
  for (const epoch::Member& member : other) {
    fleet_.Agent("engine-b-agent").Report(epoch::PreparedReport{newer, member});
  }
  fleet_.Run();
  const auto commits = EngineAgent().All<epoch::CommitCommand>();
  ASSERT_FALSE(commits.empty());
  EXPECT_EQ(commits[0].content, now.serving.epoch);
  EXPECT_EQ(commits[0].version, Version(2));
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(3)) << "filled afterwards";
  EXPECT_EQ(fleet_.EngineNamed("engine-a").held, epoch::Contents{now.serving})
      << "version 2 was served before";
}

TEST_F(CoordinatorRejoin, ASwapThatDoesNotEndIsAskedForAgainAndEvictsNobody) {
  Publish(1);
  const control::RejoinState before = Serving(1);
  Restart();
  EngineAgent().deaf = [](const auto&) { return true; };
  const control::RejoinState staged = Staged(before.serving.epoch.value, {});
  RejoinEngine({staged, staged});
  EXPECT_EQ(fleet_.EngineNamed("engine-a").state, EngineState::kInstalling);
  fleet_.Run(fleet_.options.commit_deadline + std::chrono::seconds(1));
  EngineAgent().deaf = nullptr;
  fleet_.Run(fleet_.options.commit_deadline + std::chrono::seconds(1));
  EXPECT_TRUE(EngineAgent().All<epoch::EvictCommand>().empty());
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(1));
}

TEST_F(CoordinatorRejoin, RanksThatMissedTheEndOfTheSwapAreTold) {
  Publish(1);
  control::RejoinState swapped = Serving(1);
  Restart();
  RejoinEngine({swapped, Staged(swapped.serving.epoch.value, {}, true)});
  EXPECT_EQ(fleet_.EngineNamed("engine-a").serving, swapped.serving.epoch);
  ASSERT_EQ(EngineAgent().All<epoch::CommitCommand>().size(), 1u);
  EXPECT_EQ(EngineAgent().All<epoch::CommitCommand>()[0].member, engine_[1]);
  ASSERT_EQ(EngineAgent().All<epoch::CommittedEverywhereCommand>().size(), 1u);
  EXPECT_EQ(EngineAgent().All<epoch::CommittedEverywhereCommand>()[0].member, engine_[1]);
}

TEST_F(CoordinatorRejoin, WhatNobodyDecidedIsAbortedAndPublishedAgain) {
  Publish(1);
  const control::RejoinState before = Serving(1);
  fleet_.PublishAll(trainer_, 2);
  Restart();
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed, before.serving.epoch);
  RejoinEngine({Staged(2, before.serving), before});
  ASSERT_EQ(EngineAgent().All<epoch::AbortCommand>().size(), 1u);
  EXPECT_EQ(EngineAgent().All<epoch::AbortCommand>()[0].member, engine_[0]);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(1));
  RejoinTrainer(Version(1));
  Publish(2);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2));
}

/// Somebody deletes the newest decisions from the journal (etcdctl del), or puts an old copy back.
TEST_F(CoordinatorRejoin, AJournalThatWentBackIsNoticedByWhatEnginesServe) {
  for (uint64_t version = 1; version <= 4; ++version) Publish(version);
  const control::RejoinState claim = Serving(4);
  fleet_.journal.ForgetCommitsAbove(Epoch(2));
  Restart();
  ASSERT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(2));
  RejoinEngine({claim, claim});
  const EngineStatus engine = fleet_.EngineNamed("engine-a");
  EXPECT_EQ(engine.state, EngineState::kServing);
  EXPECT_EQ(engine.version, Version(4));
  EXPECT_TRUE(EngineAgent().All<epoch::EvictCommand>().empty()) << "it is not fenced";
  const StatusSnapshot status = fleet_.coordinator->Snapshot();
  EXPECT_EQ(status.committed, claim.serving.epoch);
  EXPECT_EQ(status.committed_version, Version(4));
  EXPECT_THAT(status.journal, HasSubstr("engine-a/1 serves version 4 of epoch 4"));
  EXPECT_EQ(fleet_.metrics.Value("journal_lost_decisions"), 1);
  EXPECT_TRUE(fleet_.journal.Committed(claim.serving.epoch)) << "the journal has it again";
  RejoinTrainer();
  EXPECT_EQ(fleet_.Publish(trainer_[0], 4).reason(), Reason::kStaleVersion);
  Publish(5);
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(5));
  EXPECT_GT(fleet_.coordinator->Snapshot().committed, claim.serving.epoch);
}

TEST_F(CoordinatorRejoin, NoNumberIsHandedOutThatAMemberHoldsAlready) {
  Publish(1);
  control::RejoinState claim = Serving(1);
  claim.holds = {{Epoch(70'000), Version(1)}};  // of reservations that the journal has lost, too
  Restart();
  RejoinTrainer();
  RejoinEngine({claim, claim});
  Publish(2);
  EXPECT_GT(fleet_.coordinator->Snapshot().committed, Epoch(70'000));
  EXPECT_GT(std::get<ReserveRecord>(fleet_.journal.durable()[ReservedAt()]).limit, Epoch(70'000));
}

/// The trainer is faster than the engines: it takes a number again before anybody knows.
TEST_F(CoordinatorRejoin, AVersionThatIsServedAlreadyIsGivenUpWhenItIsNoticed) {
  for (uint64_t version = 1; version <= 4; ++version) Publish(version);
  const control::RejoinState claim = Serving(4);
  fleet_.journal.ForgetCommitsAbove(Epoch(2));
  Restart();
  RejoinTrainer();
  fleet_.PublishAll(trainer_, 3);
  fleet_.Run();
  RejoinEngine({claim, claim});
  const auto released = fleet_.Released(trainer_[0], 3);
  ASSERT_TRUE(released.has_value());
  EXPECT_EQ(released->reason(), Reason::kStaleVersion) << released->ToString();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(4));
}

TEST_F(CoordinatorRejoin, AnEngineThatIsBehindIsToldAndFilled) {
  const auto other = fleet_.Engine("engine-b", 2);
  Publish(1);
  const control::RejoinState old = Serving(1);
  ASSERT_TRUE(fleet_.coordinator->Evict("engine-a", "test").ok());
  Publish(2);
  const control::RejoinState now = Serving(2);
  Restart();
  RejoinEngine({old, old});
  EXPECT_FALSE(fleet_.EngineNamed("engine-a").ready);
  std::vector<epoch::Member> holders = other;
  Rejoin(control::GroupRole::kEngine, "engine-b", holders, {now, now});
  fleet_.Run();
  EXPECT_EQ(fleet_.EngineNamed("engine-a").version, Version(2)) << "filled from engine-b";
}

TEST_F(CoordinatorRejoin, ClaimsThatDoNotFitEndTheEngine) {
  Publish(1);
  const control::RejoinState served = Serving(1);
  Restart();
  RejoinEngine({served, {}});
  EXPECT_EQ(fleet_.metrics.Value("engines_recalled_total{outcome=refused}"), 1);
  ASSERT_EQ(EngineAgent().All<epoch::EvictCommand>().size(), 2u);
  EXPECT_THAT(EngineAgent().All<epoch::EvictCommand>()[0].why.message(),
              HasSubstr("different epochs"));
  EXPECT_EQ(RegisterAgain(control::GroupRole::kEngine, "engine-a", engine_[0], 0, served)
                .error()
                .reason(),
            Reason::kStaleIncarnation);
}

TEST_F(CoordinatorRejoin, AVersionThatAnotherRankWasReleasedFromIsGivenUp) {
  Publish(1);
  Restart();
  control::RejoinState released, holds;
  released.released = Version(2);
  holds.released = Version(1);
  const auto second = RegisterAgain(control::GroupRole::kTrainer, "trainer", trainer_[1], 1, holds);
  ASSERT_TRUE(fleet_.SubmitRows(*second, 1, 2).ok());
  ASSERT_TRUE(fleet_.Publish(*second, 2).ok());
  fleet_.Run();
  EXPECT_EQ(fleet_.Released(*second, 2), std::nullopt) << "the other one may still come";
  const auto first =
      RegisterAgain(control::GroupRole::kTrainer, "trainer", trainer_[0], 0, released);
  ASSERT_TRUE(fleet_.SubmitRows(*first, 0, 2).ok());
  fleet_.Run();
  ASSERT_TRUE(fleet_.Released(*second, 2).has_value());
  EXPECT_EQ(fleet_.Released(*second, 2)->reason(), Reason::kStaleVersion);
  EXPECT_EQ(fleet_.Publish(*first, 2).reason(), Reason::kStaleVersion);
  trainer_ = {*first, *second};
  RejoinEngine({{}, {}});
  Publish(3);
  EXPECT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(3));
}

TEST_F(CoordinatorRejoin, HistoryIsTheJournals) {
  const auto before = fleet_.Agent("trainer-agent").Open();
  Restart();
  const auto after = fleet_.Agent("trainer-agent").Open();
  EXPECT_NE(before->history, JournalId{});
  EXPECT_EQ(after->history, before->history);
  Options options;
  options.random_ticket = [] { return Ticket{3, 1, 4, 1, 5}; };
  Fleet other(options);
  EXPECT_NE(other.Agent("trainer-agent").Open()->history, before->history);
}

}  // namespace
}  // namespace weightwire::coordinator::testing
