#include "server/rpc/status_message.h"

#include <gtest/gtest.h>

#include <string>

#include "server/wire/limits.h"

namespace weightwire::rpc {
namespace {

coordinator::StatusSnapshot SnapshotOf(size_t engines, size_t epochs, size_t name_bytes) {
  coordinator::StatusSnapshot snapshot;
  for (size_t i = 0; i < engines; ++i) {
    coordinator::EngineStatus engine;
    engine.name = std::to_string(i) + std::string(name_bytes, 'e');
    snapshot.engines.push_back(engine);
  }
  for (size_t i = 0; i < epochs; ++i) {
    coordinator::EpochStatus epoch;
    epoch.epoch = Epoch(epochs - i);
    for (const auto& engine : snapshot.engines) epoch.engines.push_back(engine.name);
    snapshot.epochs.push_back(epoch);
  }
  return snapshot;
}

TEST(StatusMessage, OfAThousandEnginesAndAllEpochsIsWhole) {
  const v1::StatusResponse status = StatusMessageOf(SnapshotOf(1'000, 256, 20));
  EXPECT_EQ(status.epochs_size(), 256);
  EXPECT_GT(status.ByteSizeLong(), size_t{4} << 20)
      << "more than gRPC lets a client take by itself";
}

TEST(StatusMessage, LeavesOffTheOldestEpochsBeyondWhatClientsTake) {
  const v1::StatusResponse status = StatusMessageOf(SnapshotOf(2'000, 256, 120));
  EXPECT_LT(status.ByteSizeLong(), wire::kAnswerBytesMax);
  EXPECT_EQ(status.engines_size(), 2'000);
  EXPECT_GT(status.epochs_size(), 100);
  EXPECT_LT(status.epochs_size(), 256);
  EXPECT_EQ(status.epochs(0).epoch(), 256u);
  EXPECT_EQ(status.epochs(0).engines_size(), 2'000);
}

}  // namespace
}  // namespace weightwire::rpc
