#include <gtest/gtest.h>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

/// tp2·pp2 to engines of three layouts, two versions; `mode` as asked for.
void PublishTwice(const std::string& trainer_socket, const std::string& engine_socket,
                  client::PublishMode mode) {
  const oracle::DenseConfig config = TinyQwen2();
  Trainer trainer(trainer_socket, config, MegatronTp2Pp2());
  Engine one(engine_socket, "engine-tp1", config, VllmTp1());
  Engine two(engine_socket, "engine-tp2", config, VllmTp2());
  Engine whole(engine_socket, "engine-hf", config, HuggingFaceWhole());
  client::PublishOptions options;
  options.mode = mode;
  for (const uint64_t version : {7, 9}) {
    const uint64_t salt = 1'000 + version;
    trainer.Fill(salt);
    trainer.Publish(version, options);
    if (mode == client::PublishMode::kSnapshot) {
      // Released right after the copy: what is written now must reach nobody.
      ASSERT_TRUE(trainer.AwaitReleases(version).ok());
      trainer.Scribble();
    }
    one.Install(version, salt);
    two.Install(version, salt);
    whole.Install(version, salt);
    if (mode == client::PublishMode::kHold) {
      const Status released = trainer.AwaitReleases(version);
      ASSERT_TRUE(released.ok()) << released.ToString();
      trainer.Scribble();
    }
    one.ExpectServes(version, salt);
    two.ExpectServes(version, salt);
    whole.ExpectServes(version, salt);
  }
}

void ExpectCommitted(const Daemon& daemon, const std::string& transport) {
  const v1::StatusResponse status = daemon.AwaitStatus(
      [](const v1::StatusResponse& s) {
        return s.epochs_size() == 2 && s.epochs(0).phase() == v1::EPOCH_PHASE_COMMITTED;
      },
      "two committed epochs");
  EXPECT_EQ(status.committed_version(), 9u);
  for (const auto& epoch : status.epochs()) {
    EXPECT_EQ(epoch.attempt(), 1u) << epoch.DebugString();
    EXPECT_GT(epoch.bytes(), 0);
    ASSERT_EQ(epoch.bytes_by_transport_size(), 1) << epoch.DebugString();
    EXPECT_EQ(epoch.bytes_by_transport().begin()->first, transport);
  }
  EXPECT_EQ(daemon.HttpGet("/readyz"), "ready\n");
}

TEST(Publish, TwoVersionsHeldBitExact) {
  Daemon daemon;
  PublishTwice(daemon.agent_socket(), daemon.agent_socket(), client::PublishMode::kHold);
  ExpectCommitted(daemon, "shm");
}

TEST(Publish, TwoVersionsFromSnapshotsBitExact) {
  Daemon daemon;
  PublishTwice(daemon.agent_socket(), daemon.agent_socket(), client::PublishMode::kSnapshot);
  ExpectCommitted(daemon, "shm");
}

TEST(Publish, ToAnotherAgentOverTcpBitExact) {
  for (const auto mode : {client::PublishMode::kHold, client::PublishMode::kSnapshot}) {
    Daemon daemon({"--transports=tcp"});
    Daemon agent({"--role=agent", "--coordinator=" + daemon.grpc(), "--transports=tcp"});
    EXPECT_EQ(agent.grpc(), "");
    PublishTwice(daemon.agent_socket(), agent.agent_socket(), mode);
    ExpectCommitted(daemon, "tcp");
  }
}

TEST(Publish, OverUcxBitExact) {
#ifdef WEIGHTWIRE_UCX
  for (const std::string tls : {"tcp,posix,cma", "tcp"}) {
    const std::vector<std::string> ucx = {"--transports=ucx", "--ucx-tls=" + tls};
    Daemon daemon(ucx);
    Daemon agent({"--role=agent", "--coordinator=" + daemon.grpc(), ucx[0], ucx[1]});
    PublishTwice(daemon.agent_socket(), agent.agent_socket(), client::PublishMode::kHold);
    ExpectCommitted(daemon, "ucx");
  }
#else
  GTEST_SKIP() << "the plug-in of ucx is not part of this build";
#endif
}

/// The agent reads from itself.
TEST(Publish, OverUcxInOneAgentBitExact) {
#ifdef WEIGHTWIRE_UCX
  Daemon daemon({"--transports=ucx"});
  PublishTwice(daemon.agent_socket(), daemon.agent_socket(), client::PublishMode::kHold);
  ExpectCommitted(daemon, "ucx");
#else
  GTEST_SKIP() << "the plug-in of ucx is not part of this build";
#endif
}

TEST(Publish, ToAnotherAgentOfThisHostOverShmBitExact) {
  Daemon daemon;
  Daemon agent({"--role=agent", "--coordinator=" + daemon.grpc()});
  PublishTwice(daemon.agent_socket(), agent.agent_socket(), client::PublishMode::kHold);
  ExpectCommitted(daemon, "shm");
}

/// Slots of two pages and segments of one: every stream takes many slots.
TEST(Publish, WithTheSmallestSlotsBitExact) {
  Daemon daemon({"--transports=tcp", "--segment-bytes-max=4096", "--slot-bytes=8192",
                 "--slots-in-pool=1", "--window=1", "--chunk-bytes=4096", "--gets-in-flight=1"});
  PublishTwice(daemon.agent_socket(), daemon.agent_socket(), client::PublishMode::kHold);
  ExpectCommitted(daemon, "tcp");
}

TEST(Publish, CommitsWhenAskedToInManualMode) {
  Daemon daemon;
  const oracle::DenseConfig config = TinyQwen2();
  Trainer trainer(daemon.agent_socket(), config, MegatronTp2Pp2());
  Engine engine(daemon.agent_socket(), "engine-a", config, VllmTp2());
  client::PublishOptions options;
  options.manual_commit = true;
  trainer.Fill(5);
  trainer.Publish(1, options);
  ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  const v1::StatusResponse staged = daemon.AwaitStatus(
      [](const v1::StatusResponse& s) {
        return s.epochs_size() == 1 && s.epochs(0).phase() == v1::EPOCH_PHASE_STAGED;
      },
      "a staged epoch");
  EXPECT_EQ(staged.committed_version(), 0u);
  grpc::ClientContext context;
  v1::CommitRequest request;
  request.set_epoch(staged.epochs(0).epoch());
  v1::CommitResponse response;
  ASSERT_TRUE(daemon.Coordinator()->Commit(&context, request, &response).ok());
  engine.Install(1, 5);
}

TEST(Publish, FillsAnEngineThatComesLater) {
  Daemon daemon;
  const oracle::DenseConfig config = TinyQwen2();
  Trainer trainer(daemon.agent_socket(), config, MegatronTp2Pp2());
  Engine first(daemon.agent_socket(), "engine-a", config, VllmTp2());
  trainer.Fill(5);
  trainer.Publish(1);
  first.Install(1, 5);
  ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  trainer.Scribble();
  Engine late(daemon.agent_socket(), "engine-b", config, VllmTp1());
  late.Install(1, 5);
  first.ExpectServes(1, 5);
}

}  // namespace
}  // namespace weightwire::integration
