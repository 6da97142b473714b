#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

namespace weightwire::integration {

/// One daemon. After each test it must still move a good version, whatever it was fed before.
class BadInput : public testing::Test {
 protected:
  explicit BadInput(std::vector<std::string> arguments = {}) : daemon_(std::move(arguments)) {}
  void TearDown() override { ExpectGoodPublish(); }

  void ExpectGoodPublish() {
    if (HasFatalFailure()) return;
    Trainer trainer(daemon_.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
    Engine engine(daemon_.agent_socket(), "engine-good", TinyQwen2(), VllmTp2());
    trainer.Fill(77);
    const uint64_t version = next_version_++;
    trainer.Publish(version);
    engine.Install(version, 77);
    const Status released = trainer.AwaitReleases(version);
    EXPECT_TRUE(released.ok()) << released.ToString();
  }

  client::Place Place(const std::string& group, size_t rank = 0, size_t world_size = 1) const {
    return PlaceOf(daemon_.agent_socket(), group, rank, world_size);
  }
  std::unique_ptr<client::Publisher> OpenPublisher(size_t rank = 0, size_t world_size = 1) {
    auto publisher = client::Publisher::Open(Place("trainer", rank, world_size));
    EXPECT_TRUE(publisher.has_value()) << publisher.error().ToString();
    return publisher ? std::move(*publisher) : nullptr;
  }

  Daemon daemon_;
  uint64_t next_version_ = 1'000;  ///< above what the tests publish themselves
};

struct Refusal {
  Code code = Code::kOk;
  Reason reason = Reason::kNone;
  std::string rank;    ///< exactly
  std::string tensor;  ///< exactly
};

/// `status` is this refusal: clear to a person, with a remedy where `remedy`.
inline void ExpectRefused(const Status& status, const Refusal& expected, bool remedy = true) {
  EXPECT_EQ(CodeName(status.code()), CodeName(expected.code)) << status.ToString();
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(expected.reason)) << status.ToString();
  EXPECT_EQ(status.rank(), expected.rank) << status.ToString();
  EXPECT_EQ(status.tensor(), expected.tensor) << status.ToString();
  EXPECT_FALSE(status.message().empty());
  EXPECT_TRUE(!remedy || !status.remedy().empty()) << status.ToString();
}

}  // namespace weightwire::integration
