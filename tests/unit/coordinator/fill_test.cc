#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::seconds;

struct Committed : Fleet {
  explicit Committed(uint32_t world = 1) {
    trainer = Trainer(1);
    holder = Engine("engine-a", world);
    PublishAll(trainer, 1);
    Run();
    epoch = coordinator->Snapshot().committed;
    EXPECT_NE(epoch, Epoch{});
  }
  std::vector<epoch::Member> trainer, holder;
  Epoch epoch;
};

TEST(CoordinatorFill, LateJoinerIsFilledFromAServingEngine) {
  Committed fleet(2);
  const size_t before = fleet.Agent("trainer-agent").commands.size();
  const auto joiner = fleet.Engine("engine-b", 3);
  fleet.Run();
  const EngineStatus engine = fleet.EngineNamed("engine-b");
  EXPECT_EQ(engine.state, EngineState::kServing);
  EXPECT_EQ(engine.serving, fleet.epoch);
  EXPECT_EQ(engine.version, Version(1));
  EXPECT_EQ(fleet.Agent("trainer-agent").commands.size(), before)
      << "the trainer is never troubled";
  const auto source = fleet.Agent("engine-a-agent").Last<epoch::PrepareCommand>();
  EXPECT_EQ(source->role, epoch::Role::kSource);
  EXPECT_EQ(source->kind, epoch::Kind::kFill);
  EXPECT_EQ(source->content, fleet.epoch);
  EXPECT_GT(source->epoch, fleet.epoch);
  EXPECT_EQ(fleet.Newest().kind, epoch::Kind::kFill);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed, fleet.epoch);
  EXPECT_EQ(fleet.metrics.Value("epochs_total{outcome=fill_committed}"), 1);
  size_t commits = 0;
  for (const auto& record : fleet.journal.durable()) {
    commits += std::holds_alternative<CommitRecord>(record) ? 1 : 0;
  }
  EXPECT_EQ(commits, 1u) << "a fill appends nothing";
}

TEST(CoordinatorFill, OneFillServesEveryoneWhoWaits) {
  Committed fleet;
  fleet.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  fleet.Engine("engine-b");
  fleet.Run();
  fleet.Engine("engine-c", 2);
  fleet.Engine("engine-d");
  fleet.Run();
  EXPECT_THAT(fleet.Newest().engines, ::testing::ElementsAre("engine-b")) << "one at a time";
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kFilling);
  fleet.Agent("engine-a-agent").deaf = nullptr;
  fleet.Run(fleet.options.prepare_deadline + seconds(1));
  EXPECT_THAT(fleet.Newest().engines, ::testing::ElementsAre("engine-b", "engine-c", "engine-d"));
  for (const char* name : {"engine-b", "engine-c", "engine-d"}) {
    EXPECT_EQ(fleet.EngineNamed(name).serving, fleet.epoch);
  }
}

TEST(CoordinatorFill, IsDroppedByTheNextEpochWhichTheJoinerJoins) {
  Committed fleet;
  fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").deaf = [](const epoch::Command& c) {
    const auto* transfer = std::get_if<epoch::TransferCommand>(&c);
    return transfer != nullptr && transfer->epoch.value == 2;
  };
  fleet.Run();
  ASSERT_EQ(fleet.Newest().kind, epoch::Kind::kFill);
  ASSERT_EQ(fleet.Newest().epoch, Epoch(2));
  EXPECT_EQ(fleet.EngineNamed("engine-b").lag, Version(1));
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run();
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  EXPECT_EQ(epochs[0].kind, epoch::Kind::kPublish);
  EXPECT_THAT(epochs[0].engines, ::testing::ElementsAre("engine-a", "engine-b"));
  EXPECT_EQ(epochs[1].kind, epoch::Kind::kFill);
  EXPECT_EQ(epochs[1].phase, epoch::Phase::kAborted);
  EXPECT_EQ(fleet.EngineNamed("engine-b").version, Version(2));
  const auto abort = fleet.Agent("engine-b-agent").Last<epoch::AbortCommand>();
  EXPECT_EQ(abort->epoch, Epoch(2));
}

TEST(CoordinatorFill, FillThatSwapsIsWaitedFor) {
  Committed fleet;
  const auto joiner = fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").deaf = [](const epoch::Command& c) {
    return std::holds_alternative<epoch::CommitCommand>(c);
  };
  fleet.Run();
  const Epoch fill = fleet.Newest().epoch;
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.Newest().epoch, fill) << "a decision is never dropped";
  fleet.Agent("engine-b-agent").deaf = nullptr;
  fleet.Agent("engine-b-agent").Report(epoch::SwappedReport{fill, joiner[0], 0});
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
  EXPECT_EQ(fleet.EngineNamed("engine-b").version, Version(2));
}

TEST(CoordinatorFill, WithoutAHolderTheStatusSaysSo) {
  Committed fleet;
  EXPECT_TRUE(fleet.coordinator->Evict("engine-a", "test").ok());
  fleet.Engine("engine-b");
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kEmpty);
  EXPECT_EQ(fleet.coordinator->Snapshot().waiting_for,
            "engine-b: no holder of epoch 1; the next version");
  fleet.PublishAll(fleet.trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-b").version, Version(2));
}

TEST(CoordinatorFill, D3WhoFailsIsFilledAgainAfterGrowingPausesUntilItIsMended) {
  Committed fleet;
  fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").corrupt = true;
  fleet.Run(seconds(60));
  const double failed = fleet.metrics.Value("epochs_total{outcome=fill_aborted}");
  EXPECT_GT(failed, fleet.options.attempts_max) << "it is not given up";
  EXPECT_LT(failed, 60);
  EXPECT_THAT(fleet.coordinator->Snapshot().waiting_for,
              ::testing::MatchesRegex("engine-b: [0-9]+ fills of epoch 1 failed; again in .* s"));
  EXPECT_THAT(fleet.EngineNamed("engine-b").last_error, ::testing::HasSubstr("digest_mismatch"));
  fleet.Agent("engine-b-agent").corrupt = false;
  fleet.Run(seconds(31));
  EXPECT_EQ(fleet.EngineNamed("engine-b").serving, fleet.epoch) << "without a new version";
}

TEST(CoordinatorFill, D3OneBadEngineUsesUpNobodyElsesAttempts) {
  Committed fleet;
  fleet.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  const std::vector<std::string> good = {"engine-b", "engine-c", "engine-d", "engine-e"};
  for (const std::string& name : good) fleet.Engine(name);
  fleet.Engine("engine-bad");
  fleet.Agent("engine-bad-agent").corrupt = true;
  fleet.Agent("engine-a-agent").deaf = nullptr;
  fleet.Run(fleet.options.prepare_deadline + seconds(2));
  for (const std::string& name : good) {
    EXPECT_EQ(fleet.EngineNamed(name).serving, fleet.epoch) << name;
    EXPECT_EQ(fleet.EngineNamed(name).last_error, "") << name;
  }
  EXPECT_EQ(fleet.EngineNamed("engine-bad").serving, Epoch{});
  size_t together = 0;
  for (const EpochStatus& epoch : fleet.coordinator->Snapshot().epochs) {
    const bool bad = std::ranges::find(epoch.engines, "engine-bad") != epoch.engines.end();
    together += bad && epoch.engines.size() > 1 ? 1 : 0;
  }
  EXPECT_EQ(together, 1u) << "from then on it is filled alone";
}

TEST(CoordinatorFill, D3SeveralFillsRunAtATimeEachFromAnotherHolder) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  for (const char* name : {"engine-c", "engine-d"}) {
    fleet.Engine(name);
    fleet.Agent(name + std::string("-agent")).deaf = [](const epoch::Command& command) {
      return std::holds_alternative<epoch::TransferCommand>(command);
    };
    fleet.Run();
  }
  for (const char* name : {"engine-c", "engine-d"}) {
    EXPECT_EQ(fleet.EngineNamed(name).state, EngineState::kFilling) << name;
  }
  for (const char* agent : {"engine-a-agent", "engine-b-agent"}) {
    EXPECT_EQ(fleet.Agent(agent).Last<epoch::PrepareCommand>()->role, epoch::Role::kSource);
  }
  // Both give way to the next version, which both join.
  for (const char* agent : {"engine-c-agent", "engine-d-agent"}) fleet.Agent(agent).deaf = nullptr;
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  for (const char* name : {"engine-a", "engine-b", "engine-c", "engine-d"}) {
    EXPECT_EQ(fleet.EngineNamed(name).version, Version(2)) << name;
  }
}

TEST(CoordinatorFill, LostSourceAbortsTheFillAndAnotherHolderTakesOver) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto first = fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.Agent("engine-a-agent").deaf = [](const auto&) { return true; };
  fleet.Engine("engine-c");
  fleet.Run();
  ASSERT_EQ(fleet.Newest().kind, epoch::Kind::kFill);
  fleet.Agent("engine-a-agent")
      .Report(epoch::LostReport{first[0], Status(Code::kAborted, Reason::kMemberLost, "gone")});
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-c").state, EngineState::kServing);
  EXPECT_EQ(fleet.Agent("engine-b-agent").Last<epoch::PrepareCommand>()->role,
            epoch::Role::kSource);
}

TEST(CoordinatorFill, EngineThatFitsNoHolderIsLeftOutAndNamed) {
  Committed fleet;
  const auto member = fleet.Register("odd", control::GroupRole::kEngine, "engine-odd", 0, 1);
  control::LayoutSubmission other;
  other.member = *member;
  other.canonical = layout::CanonicalSpace{{{"zz", layout::DType::kF32, {3}}}};
  other.layout = RowShard(*other.canonical, 0, 1);
  ASSERT_TRUE(fleet.Submit(other).has_value());
  fleet.Engine("engine-b");
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kServing);
  EXPECT_EQ(fleet.EngineNamed("engine-odd").state, EngineState::kEmpty);
  EXPECT_THAT(fleet.EngineNamed("engine-odd").last_error, ::testing::HasSubstr("tensor_missing"));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
