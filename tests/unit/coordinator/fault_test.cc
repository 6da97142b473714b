#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

template <typename T>
bool Is(const epoch::Command& command) {
  return std::holds_alternative<T>(command);
}
const Status kEnded(Code::kAborted, Reason::kMemberLost, "the process ended");

TEST(CoordinatorFault, RetrySucceedsWithoutTheDeadEngine) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  const auto dying = fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").deaf = Is<epoch::TransferCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.Agent("engine-b-agent").Report(epoch::LostReport{dying[0], kEnded});
  fleet.Run();
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  ASSERT_EQ(epochs.size(), 2u);
  EXPECT_EQ(epochs[1].phase, epoch::Phase::kAborted);
  EXPECT_EQ(epochs[1].why.reason(), Reason::kMemberLost);
  EXPECT_EQ(epochs[1].why.rank(), "engine-b/0");
  EXPECT_EQ(epochs[0].phase, epoch::Phase::kCommitted);
  EXPECT_EQ(epochs[0].attempt, 2u);
  EXPECT_THAT(epochs[0].engines, ::testing::ElementsAre("engine-a"));
  EXPECT_TRUE(fleet.Released(trainer[0], 1)->ok());
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kDirty);
}

/// A rank that loses its peer's process says that the peer gave up, with the peer's own reason,
/// which is an abort; and it may say so before the loss is known.
TEST(CoordinatorFault, AReadersWordForALossIsNoOperatorsAbort) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto reader = fleet.Engine("engine-a");
  const auto dying = fleet.Engine("engine-b");
  for (const char* agent : {"engine-a-agent", "engine-b-agent"}) {
    fleet.Agent(agent).deaf = Is<epoch::TransferCommand>;
  }
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const Epoch epoch = fleet.Newest().epoch;
  fleet.Agent("engine-a-agent").deaf = nullptr;
  fleet.Agent("engine-a-agent")
      .Report(epoch::FailedReport{
          epoch, reader[0], Status(Code::kAborted, Reason::kAbortRequested, "the source gave up"),
          false});
  fleet.Agent("engine-b-agent").Report(epoch::LostReport{dying[0], kEnded});
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitted);
  EXPECT_EQ(fleet.Newest().attempt, 2u);
  EXPECT_TRUE(fleet.Released(trainer[0], 1)->ok());
}

TEST(CoordinatorFault, EngineThatDiesWhilePlansAreMadeCostsNoAttempt) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto dying = fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  control::PublishRequest request;
  request.member = trainer[0];
  request.version = Version(1);
  request.deadline = seconds(100);
  // Plans come back in later tasks: the engine is gone before the first of them runs.
  fleet.coordinator->Publish(request, [](const Status& status) { EXPECT_TRUE(status.ok()); });
  fleet.coordinator->Report(fleet.Agent("engine-a-agent").id(),
                            epoch::LostReport{dying[0], kEnded});
  fleet.Run();
  EXPECT_TRUE(fleet.Agent("engine-a-agent").commands.empty());
  ASSERT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u);
  EXPECT_EQ(fleet.Newest().attempt, 1u);
  EXPECT_THAT(fleet.Newest().engines, ::testing::ElementsAre("engine-b"));
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitted);
}

TEST(CoordinatorFault, ExhaustedRetriesReleaseWithTheReason) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").corrupt = true;
  fleet.PublishAll(trainer, 1);
  fleet.Run(seconds(1));
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  ASSERT_EQ(epochs.size(), fleet.options.attempts_max);
  for (const auto& epoch : epochs) EXPECT_EQ(epoch.why.reason(), Reason::kDigestMismatch);
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kDigestMismatch);
  EXPECT_EQ(fleet.coordinator->Snapshot().committed, Epoch{});
  EXPECT_EQ(fleet.metrics.Value("epoch_aborts_total{reason=digest_mismatch}"), 3);
  fleet.Agent("engine-a-agent").corrupt = false;
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(2));
}

TEST(CoordinatorFault, RetryWaitsUntilEveryoneHasDrained) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto engine = fleet.Engine("engine-a");
  FakeAgent& agent = fleet.Agent("engine-a-agent");
  agent.deaf = [](const auto& c) { return Is<epoch::AbortCommand>(c); };
  agent.corrupt = true;
  fleet.PublishAll(trainer, 1);
  fleet.Run(seconds(2));
  agent.corrupt = false;
  ASSERT_EQ(agent.All<epoch::PrepareCommand>().size(), 1u);
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kAborting);
  EXPECT_THAT(fleet.Newest().waiting_for, ::testing::ElementsAre("engine-a/0: drained"));
  agent.Report(epoch::DrainedReport{fleet.Newest().epoch, engine[0]});
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
}

TEST(CoordinatorFault, EngineThatDoesNotDrainIsEvicted) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  FakeAgent& agent = fleet.Agent("engine-a-agent");
  agent.deaf = [](const auto&) { return true; };
  fleet.PublishAll(trainer, 1);
  fleet.Run(fleet.options.prepare_deadline + fleet.options.abort_deadline + seconds(1));
  EXPECT_TRUE(agent.Last<epoch::EvictCommand>().has_value());
  EXPECT_EQ(fleet.EngineNamed("engine-a").state, EngineState::kDirty);
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kServing);
}

TEST(CoordinatorFault, EngineThatDoesNotSwapIsLeftBehindAndTheEpochCommits) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b", 2);
  fleet.Agent("engine-b-agent").deaf = Is<epoch::CommitCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-b").state, EngineState::kInstalling);
  EXPECT_THAT(fleet.Newest().waiting_for, ::testing::ElementsAre("engine-b/0: swapped"));
  fleet.Run(fleet.options.commit_deadline);
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitted);
  EXPECT_TRUE(fleet.Agent("engine-b-agent").All<epoch::EvictCommand>().empty());
  EXPECT_EQ(fleet.EngineNamed("engine-b").serving, Epoch{});
  EXPECT_FALSE(fleet.EngineNamed("engine-b").ready);
}

TEST(CoordinatorFault, LostRankMakesTheEngineDirtyUntilAllAreNew) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto old = fleet.Engine("engine-a", 2);
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.Agent("engine-a-agent").Report(epoch::LostReport{old[1], kEnded});
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-a").state, EngineState::kDirty);
  EXPECT_EQ(fleet.EngineNamed("engine-a").ranks_present, 0u);
  const auto evicted = fleet.Agent("engine-a-agent").All<epoch::EvictCommand>();
  ASSERT_EQ(evicted.size(), 1u) << "the lost rank is not told";
  EXPECT_EQ(evicted[0].member, old[0]);
  EXPECT_EQ(fleet
                .Register("engine-a-agent", control::GroupRole::kEngine, "engine-a", 0, 2,
                          old[0].incarnation.value)
                .error()
                .reason(),
            Reason::kStaleIncarnation);
  const auto fresh = fleet.Engine("engine-a", 2);
  EXPECT_EQ(fresh[0].id, old[0].id) << "the place keeps its id";
  EXPECT_NE(fresh[0].incarnation, old[0].incarnation);
  fleet.Run();
  EXPECT_EQ(fleet.EngineNamed("engine-a").state, EngineState::kEmpty);
}

TEST(CoordinatorFault, SilentAgentIsCutOffWithinLeasePlusHeartbeat) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  FakeAgent& agent = fleet.Agent("engine-a-agent");
  fleet.Run(seconds(60));
  EXPECT_FALSE(agent.session_lost.has_value()) << "no false expiry";
  agent.StopHeartbeats();
  fleet.Run(fleet.options.lease - fleet.options.heartbeat - milliseconds(1));
  EXPECT_FALSE(agent.session_lost.has_value());
  fleet.Run(2 * fleet.options.heartbeat + milliseconds(2));
  ASSERT_TRUE(agent.session_lost.has_value());
  EXPECT_EQ(agent.session_lost->reason(), Reason::kLeaseExpired);
  EXPECT_EQ(fleet.EngineNamed("engine-a").state, EngineState::kCutOff);
  EXPECT_FALSE(fleet.Agent("trainer-agent").session_lost.has_value());
  EXPECT_EQ(fleet.metrics.Value("lease_expiries_total{role=engine}"), 1);
  EXPECT_EQ(fleet.metrics.Value("lease_expiries_total{role=trainer}"), 0);
}

/// The simulator's clock, with jumps as after a SIGSTOP.
struct JumpingClock final : Clock {
  explicit JumpingClock(const SimExecutor& of) : sim(of) {}
  Nanos Now() const override { return sim.Now() + jumped; }
  double WallSeconds() const override { return sim.WallSeconds(); }
  const SimExecutor& sim;
  Nanos jumped{0};
};

TEST(CoordinatorFault, StoppedCoordinatorExpiresNobodyWhenItGoesOn) {
  Fleet fleet;
  JumpingClock clock(fleet.sim);
  fleet.coordinator.reset();
  auto made =
      Coordinator::Make(fleet.options, clock, fleet.sim, fleet.sim, fleet.journal, fleet.metrics);
  fleet.coordinator = std::move(*made);
  fleet.Engine("engine-a");
  fleet.Run(seconds(20));
  clock.jumped = seconds(600);
  fleet.Run(seconds(20));
  EXPECT_FALSE(fleet.Agent("engine-a-agent").session_lost.has_value());
  fleet.Agent("engine-a-agent").StopHeartbeats();
  fleet.Run(fleet.options.lease + 2 * fleet.options.heartbeat);
  EXPECT_TRUE(fleet.Agent("engine-a-agent").session_lost.has_value());
}

TEST(CoordinatorFault, LeaseExpiryDuringATransferAbortsAndGoesOnWithoutIt) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  FakeAgent& agent = fleet.Agent("engine-b-agent");
  agent.deaf = Is<epoch::TransferCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  agent.StopHeartbeats();
  fleet.Run(fleet.options.lease + fleet.options.heartbeat + seconds(1));
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1));
  EXPECT_EQ(fleet.Newest().attempt, 2u);
}

TEST(CoordinatorFault, LostTrainerRankReleasesTheOthers) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = Is<epoch::TransferCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  fleet.Agent("trainer-agent").Report(epoch::LostReport{trainer[1], kEnded});
  fleet.Run();
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kMemberLost);
  EXPECT_FALSE(fleet.Released(trainer[1], 1).has_value()) << "nobody is there to be told";
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u);
  EXPECT_TRUE(fleet.Agent("trainer-agent").All<epoch::EvictCommand>().empty())
      << "a trainer's other ranks stay";
}

TEST(CoordinatorFault, SubsetThatPublishedIsReleasedWhenARankDies) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(3);
  EXPECT_TRUE(fleet.Publish(trainer[0], 1).ok());
  EXPECT_TRUE(fleet.Publish(trainer[1], 1).ok());
  fleet.Agent("trainer-agent").Report(epoch::LostReport{trainer[2], kEnded});
  fleet.Run();
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kMemberLost);
  EXPECT_EQ(fleet.Released(trainer[1], 1)->reason(), Reason::kMemberLost);
  const Status missing = fleet.Publish(trainer[0], 2);
  EXPECT_EQ(missing.reason(), Reason::kMissingRank);
  EXPECT_THAT(missing.message(), ::testing::HasSubstr("trainer/2"));
}

TEST(CoordinatorFault, RestartedTrainerGoesOnAboveTheCommittedVersion) {
  Fleet fleet;
  const auto old = fleet.Trainer(2);
  fleet.Engine("engine-a");
  fleet.PublishAll(old, 5);
  fleet.Run();
  fleet.Agent("engine-a-agent").deaf = Is<epoch::TransferCommand>;
  fleet.PublishAll(old, 6);
  fleet.Run();
  EXPECT_TRUE(fleet.coordinator->Evict("trainer", "test").ok());
  fleet.Agent("engine-a-agent").deaf = nullptr;
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kAborted);
  const auto fresh = fleet.Trainer(2);
  EXPECT_EQ(fleet.Publish(fresh[0], 5).reason(), Reason::kStaleVersion);
  EXPECT_EQ(fleet.Publish(old[0], 7).reason(), Reason::kStaleIncarnation);
  fleet.PublishAll(fresh, 6);
  fleet.Run();
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(6));
  EXPECT_EQ(fleet.EngineNamed("engine-a").version, Version(6));
}

TEST(CoordinatorFault, VersionsDeadlineEndsItsAttempts) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = Is<epoch::PrepareCommand>;
  fleet.PublishAll(trainer, 1, false, seconds(10));
  fleet.Run(seconds(9));
  EXPECT_FALSE(fleet.Released(trainer[0], 1).has_value());
  fleet.Run(seconds(2));
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(fleet.coordinator->Snapshot().epochs.size(), 1u);
}

TEST(CoordinatorFault, PhaseDeadlineNamesTheStraggler) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a", 2);
  fleet.Agent("engine-a-agent").deaf = [n = 0](const epoch::Command& c) mutable {
    return Is<epoch::TransferCommand>(c) && ++n == 2;
  };
  fleet.PublishAll(trainer, 1, false, seconds(1'000));
  fleet.Run(fleet.options.transfer_deadline + seconds(1));
  const auto epochs = fleet.coordinator->Snapshot().epochs;
  ASSERT_GE(epochs.size(), 2u);
  const EpochStatus& first = epochs.back();
  EXPECT_EQ(first.why.reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ(first.why.rank(), "engine-a/1");
  EXPECT_EQ(fleet.coordinator->Snapshot().committed_version, Version(1)) << "second attempt";
}

TEST(CoordinatorFault, ReportsOfAnotherAgentOrEpochChangeNothing) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  const auto engine = fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = Is<epoch::PrepareCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const Epoch epoch = fleet.Newest().epoch;
  FakeAgent& stranger = fleet.Agent("stranger");
  stranger.Report(epoch::PreparedReport{epoch, engine[0]});
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("fenced_requests_total{cause=wrong_agent}"), 1);
  FakeAgent& agent = fleet.Agent("engine-a-agent");
  agent.Report(epoch::PreparedReport{Epoch(epoch.value + 50), engine[0]});
  agent.Report(epoch::PreparedReport{epoch, {engine[0].id, Incarnation(5)}});
  fleet.Run();
  EXPECT_EQ(fleet.metrics.Value("fenced_requests_total{cause=stale_epoch}"), 1);
  EXPECT_EQ(fleet.metrics.Value("fenced_requests_total{cause=stale_incarnation}"), 1);
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kPreparing);
  agent.Report(epoch::PreparedReport{epoch, engine[0]});
  fleet.Run();
  EXPECT_EQ(fleet.Newest().phase, epoch::Phase::kCommitted);
}

TEST(CoordinatorFault, ShutdownAbortsReleasesAndEndsSessions) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Agent("engine-a-agent").deaf = Is<epoch::TransferCommand>;
  fleet.PublishAll(trainer, 1);
  fleet.PublishAll(trainer, 2);
  fleet.Run();
  bool done = false;
  fleet.coordinator->Shutdown([&](const Status& status) { done = status.ok(); });
  EXPECT_EQ(fleet.Publish(trainer[0], 3).reason(), Reason::kShuttingDown);
  EXPECT_EQ(
      fleet.Register("engine-a-agent", control::GroupRole::kEngine, "x", 0, 1).error().reason(),
      Reason::kShuttingDown);
  fleet.Run();
  EXPECT_TRUE(done);
  EXPECT_EQ(fleet.Released(trainer[0], 1)->reason(), Reason::kShuttingDown);
  EXPECT_EQ(fleet.Released(trainer[0], 2)->reason(), Reason::kShuttingDown);
  for (const auto& [name, agent] : fleet.agents) {
    ASSERT_TRUE(agent->session_lost.has_value()) << name;
    EXPECT_EQ(agent->session_lost->reason(), Reason::kShuttingDown);
  }
}

TEST(CoordinatorFault, MayBeDestroyedInTheMiddleOfAnything) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.PublishAll(trainer, 1);
  fleet.coordinator.reset();
  for (auto& [name, agent] : fleet.agents) agent->StopHeartbeats();
  auto made = Coordinator::Make(fleet.options, fleet.sim, fleet.sim, fleet.sim, fleet.journal,
                                fleet.metrics);
  ASSERT_TRUE(made.has_value());
  fleet.coordinator = std::move(*made);
  fleet.Run(seconds(200));
  EXPECT_TRUE(fleet.coordinator->Snapshot().epochs.empty());
}

}  // namespace
}  // namespace weightwire::coordinator::testing
