#include <gtest/gtest.h>

#include <csignal>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

// Processes that stop, hang or die while others go on.
namespace weightwire::integration {
namespace {

/// A data plane on which BiggerQwen2 takes thousands of round trips, so that a test can step in.
const std::vector<std::string> kSlow = {
    "--transports=tcp", "--segment-bytes-max=4096", "--slot-bytes=8192",  "--slots-in-pool=1",
    "--window=1",       "--chunk-bytes=4096",       "--gets-in-flight=1", "--lease-ms=60000"};

std::vector<std::string> AgentOf(const Daemon& coordinator, std::vector<std::string> arguments) {
  arguments.insert(arguments.end(), {"--role=agent", "--coordinator=" + coordinator.grpc()});
  return arguments;
}

const v1::StatusResponse::Engine* Find(const v1::StatusResponse& status, const std::string& name) {
  for (const auto& engine : status.engines()) {
    if (engine.name() == name) return &engine;
  }
  return nullptr;
}

auto NewestEpochIs(v1::EpochPhase phase, uint64_t version) {
  return [phase, version](const v1::StatusResponse& s) {
    return s.epochs_size() > 0 && s.epochs(0).phase() == phase && s.epochs(0).version() == version;
  };
}

/// Blocks until the subscriber was told that it must not serve.
void AwaitFence(client::Subscriber& subscriber) {
  const Nanos end = SystemClock().Now() + kPatience;
  while (subscriber.Serving().has_value() && SystemClock().Now() < end) {
    (void)subscriber.WaitOffer(std::chrono::milliseconds(5));
  }
  EXPECT_FALSE(subscriber.Serving().has_value());
  EXPECT_FALSE(subscriber.LastFence().ok());
}

TEST(Failure, SigtermOfAnIdleDaemonExitsZero) {
  Daemon daemon;
  Daemon agent(AgentOf(daemon, {}));
  EXPECT_EQ(agent.Stop(), 0);
  EXPECT_EQ(daemon.Stop(), 0);
}

TEST(Failure, SigtermWithAttachedProcessesExitsZeroAndFencesThem) {
  Daemon daemon;
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine engine(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  trainer.Fill(3);
  trainer.Publish(1);
  engine.Install(1, 3);
  EXPECT_EQ(daemon.Stop(), 0);
  AwaitFence(engine.rank(0));
  AwaitFence(engine.rank(1));
}

/// Sessions of two transports in one agent: the end of one leaves the other alone.
TEST(Failure, SigtermAfterTransfersOverTwoTransportsExitsZero) {
  Daemon daemon;
  Daemon agent(AgentOf(daemon, {"--transports=tcp"}));
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine near(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  Engine far(agent.agent_socket(), "engine-b", TinyQwen2(), VllmTp1());
  for (const uint64_t version : {1, 2}) {
    trainer.Fill(version);
    trainer.Publish(version);
    near.Install(version, version);
    far.Install(version, version);
    ASSERT_TRUE(trainer.AwaitReleases(version).ok());
  }
  EXPECT_EQ(agent.Stop(), 0);
  trainer.Fill(3);
  trainer.Publish(3);
  near.Install(3, 3);
  ASSERT_TRUE(trainer.AwaitReleases(3).ok());
  EXPECT_EQ(daemon.Stop(), 0);
}

/// The peer's ends of the data sessions stay open: they are cut, and nobody is left to be told.
TEST(Failure, SigtermWhileAPeerHangsExitsZero) {
  for (const std::string transport : {"shm", "tcp"}) {
    Daemon daemon({"--transports=" + transport});
    Daemon agent(AgentOf(daemon, {"--transports=" + transport}));
    Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
    Engine engine(agent.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
    trainer.Fill(3);
    trainer.Publish(1);
    engine.Install(1, 3);
    ASSERT_TRUE(trainer.AwaitReleases(1).ok());
    agent.Signal(SIGSTOP);
    EXPECT_EQ(daemon.Stop(), 0) << transport;
    agent.Signal(SIGCONT);
  }
}

TEST(Failure, SigtermOfTheCoordinatorMidTransferExitsZero) {
  Daemon daemon(kSlow);
  Daemon agent(AgentOf(daemon, kSlow));
  Trainer trainer(daemon.agent_socket(), BiggerQwen2(), HuggingFaceWhole());
  Engine engine(agent.agent_socket(), "engine-a", BiggerQwen2(), VllmTp1());
  trainer.Fill(3);
  trainer.Publish(1);
  daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_TRANSFERRING, 1), "a transfer");
  EXPECT_EQ(daemon.Stop(), 0);
  const Status released = trainer.AwaitReleases(1);
  EXPECT_EQ(ReasonName(released.reason()), ReasonName(Reason::kShuttingDown))
      << released.ToString();
  EXPECT_FALSE(engine.rank(0).Serving().has_value());
}

TEST(Failure, SigtermOfAnAgentMidTransferExitsZeroAndOthersCommit) {
  Daemon daemon(kSlow);
  Daemon agent(AgentOf(daemon, kSlow));
  Trainer trainer(daemon.agent_socket(), BiggerQwen2(), HuggingFaceWhole());
  Engine leaving(agent.agent_socket(), "engine-b", BiggerQwen2(), VllmTp1());
  Engine staying(daemon.agent_socket(), "engine-a", BiggerQwen2(), VllmTp1());
  trainer.Fill(3);
  trainer.Publish(1);
  daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_TRANSFERRING, 1), "a transfer");
  EXPECT_EQ(agent.Stop(), 0);
  staying.Install(1, 3);
  EXPECT_TRUE(trainer.AwaitReleases(1).ok());
  const v1::StatusResponse status =
      daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_COMMITTED, 1), "the attempt committed");
  ASSERT_EQ(status.epochs_size(), 1) << "it costs its own place, not an attempt";
  EXPECT_EQ(status.epochs(0).attempt(), 1u);
  ASSERT_EQ(status.epochs(0).left_out_size(), 1);
  EXPECT_EQ(status.epochs(0).left_out(0), "engine-b");
}

TEST(Failure, KilledPublisherMidHoldAbortsAndEnginesKeepServing) {
  Daemon daemon({"--lease-ms=60000"});
  Daemon agent(AgentOf(daemon, {"--transports=tcp"}));
  const TempDir dir;
  const auto publish = [&](const std::string& version, const std::string& salt) {
    return Child::Options{
        {BinPath("integration_publisher"), daemon.agent_socket(), version, salt, "tiny"},
        {},
        dir.path() + "/publisher"};
  };
  Engine near(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  Engine far(agent.agent_socket(), "engine-b", TinyQwen2(), VllmTp1());
  {
    Child first(publish("1", "31"));
    near.Install(1, 31);
    far.Install(1, 31);
    EXPECT_EQ(first.WaitExit(kPatience), 0) << ReadFile(dir.path() + "/publisher");
  }
  agent.Signal(SIGSTOP);  // its rank cannot prepare: the version stays held
  {
    Child second(publish("2", "32"));
    EXPECT_EQ(second.ReadLine(), "published");
    daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_PREPARING, 2), "version 2 preparing");
  }  // SIGKILL
  // Before the agent can prepare: what it has read in full is rightly committed.
  daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_ABORTING, 2), "the loss noticed");
  agent.Signal(SIGCONT);
  const v1::StatusResponse status =
      daemon.AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_ABORTED, 2), "version 2 aborted");
  EXPECT_EQ(status.epochs(0).why().detail().reason(), v1::REASON_MEMBER_LOST);
  EXPECT_EQ(status.epochs(0).why().detail().rank(), "trainer/0");
  EXPECT_EQ(status.committed_version(), 1u);
  near.ExpectServes(1, 31);
  far.ExpectServes(1, 31);
  {
    Child third(publish("3", "33"));
    near.Install(3, 33);
    far.Install(3, 33);
    EXPECT_EQ(third.WaitExit(kPatience), 0);
  }
}

TEST(Failure, KilledAgentIsNoticedAndOthersGoOn) {
  Daemon daemon;
  Daemon agent(AgentOf(daemon, {}));
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine near(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  Engine far(agent.agent_socket(), "engine-b", TinyQwen2(), VllmTp2());
  trainer.Fill(1);
  trainer.Publish(1);
  near.Install(1, 1);
  far.Install(1, 1);
  ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  agent.Kill();
  const v1::StatusResponse status = daemon.AwaitStatus(
      [](const v1::StatusResponse& s) { return s.agents() == 1; }, "one agent left");
  ASSERT_NE(Find(status, "engine-b"), nullptr);
  EXPECT_EQ(Find(status, "engine-b")->ranks_present(), 0u);
  EXPECT_EQ(Find(status, "engine-b")->state(), v1::ENGINE_STATE_CUT_OFF);
  EXPECT_EQ(Find(status, "engine-a")->state(), v1::ENGINE_STATE_SERVING);
  AwaitFence(far.rank(0));
  AwaitFence(far.rank(1));
  trainer.Fill(2);
  trainer.Publish(2);
  near.Install(2, 2);
  EXPECT_TRUE(trainer.AwaitReleases(2).ok());
}

TEST(Failure, AnEngineServesOnWhenItsAgentIsSilentPastItsLeaseAndThenBack) {
  Daemon daemon({"--heartbeat-ms=200", "--lease-ms=2000"});
  Daemon agent(AgentOf(daemon, {}));
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine near(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp1());
  Engine far(agent.agent_socket(), "engine-b", TinyQwen2(), VllmTp2());
  trainer.Fill(1);
  trainer.Publish(1);
  near.Install(1, 1);
  far.Install(1, 1);
  ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  trainer.Scribble();
  agent.Signal(SIGSTOP);
  const v1::StatusResponse status = daemon.AwaitStatus(
      [](const v1::StatusResponse& s) { return s.agents() == 1; }, "one agent left");
  ASSERT_NE(Find(status, "engine-b"), nullptr);
  EXPECT_NE(Find(status, "engine-b")->last_error().find("lease_expired"), std::string::npos)
      << Find(status, "engine-b")->last_error();
  far.ExpectServes(1, 1);
  agent.Signal(SIGCONT);
  daemon.AwaitStatus(
      [](const v1::StatusResponse& s) {
        const auto* engine = Find(s, "engine-b");
        return engine != nullptr && engine->state() == v1::ENGINE_STATE_SERVING && engine->ready();
      },
      "engine-b is back");
  near.ExpectServes(1, 1);
  far.ExpectServes(1, 1);
  trainer.Fill(2);
  trainer.Publish(2);
  near.Install(2, 2);
  far.Install(2, 2);
}

TEST(Failure, CoordinatorRestartedOnItsJournalKeepsEpochsRising) {
  const TempDir dir;
  const std::vector<std::string> arguments = {"--role=coordinator",
                                              "--state-dir=" + dir.path() + "/state"};
  auto coordinator = std::make_unique<Daemon>(arguments);
  Daemon agent(AgentOf(*coordinator, {}));
  Engine engine(agent.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  {
    Trainer trainer(agent.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
    trainer.Fill(1);
    trainer.Publish(1);
    engine.Install(1, 1);
    ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  }
  const uint64_t epoch = coordinator->GetStatus().committed_epoch();
  std::vector<std::string> again = arguments;
  again.push_back("--listen=" + coordinator->grpc());
  coordinator->Kill();
  coordinator = std::make_unique<Daemon>(again);
  const v1::StatusResponse back = coordinator->AwaitStatus(
      [](const v1::StatusResponse& s) {
        return s.participants_size() == 2 && s.participants(1).has_layout();
      },
      "the engine is here again");
  EXPECT_EQ(back.committed_epoch(), epoch);
  EXPECT_EQ(back.committed_version(), 1u);
  Trainer trainer(agent.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  const Status stale = trainer.rank(0).Publish(Version(1));
  EXPECT_EQ(ReasonName(stale.reason()), ReasonName(Reason::kStaleVersion)) << stale.ToString();
  trainer.Fill(2);
  trainer.Publish(2);
  engine.Install(2, 2);
  EXPECT_TRUE(trainer.AwaitReleases(2).ok());
  const v1::StatusResponse status =
      coordinator->AwaitStatus(NewestEpochIs(v1::EPOCH_PHASE_COMMITTED, 2), "version 2 committed");
  EXPECT_GT(status.committed_epoch(), epoch);
}

TEST(Failure, RankThatLeftCanComeBackAtOnce) {
  Daemon daemon;
  Daemon agent(AgentOf(daemon, {}));
  for (const Daemon* place : {&daemon, &agent}) {
    for (int life = 0; life < 50; ++life) {
      auto publisher = client::Publisher::Open(PlaceOf(place->agent_socket(), "trainer"));
      ASSERT_TRUE(publisher.has_value()) << "life " << life << ": " << publisher.error().ToString();
    }
  }
}

TEST(Failure, SecondDaemonOnTheSameSocketIsRefused) {
  Daemon daemon;
  const Finished second = RunTool("weightwired", {"--agent-socket=" + daemon.agent_socket(),
                                                  "--listen=127.0.0.1:0", "--http=127.0.0.1:0"});
  EXPECT_EQ(second.code, 64 + static_cast<int>(Reason::kIoError)) << second.err;
  EXPECT_NE(second.err.find(daemon.agent_socket()), std::string::npos) << second.err;
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
}

TEST(Failure, SocketOfAKilledDaemonIsTakenOver) {
  Daemon first;
  first.Kill();
  Daemon second({"--agent-socket=" + first.agent_socket()});
  Trainer trainer(first.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
}

}  // namespace
}  // namespace weightwire::integration
