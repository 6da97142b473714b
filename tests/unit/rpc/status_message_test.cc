#include "server/rpc/status_message.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "server/wire/limits.h"

namespace weightwire::rpc {
namespace {

using Runs = google::protobuf::RepeatedField<uint32_t>;

/// As a client reads them.
std::vector<std::string> NamesOf(const v1::StatusResponse& status, const Runs& runs) {
  std::vector<std::string> table, names;
  for (const auto& engine : status.engines()) table.push_back(engine.name());
  for (const auto& name : status.engine_names()) table.push_back(name);
  for (int i = 0; i + 1 < runs.size(); i += 2) {
    for (uint32_t k = 0; k < runs[i + 1]; ++k) names.push_back(table.at(runs[i] + k));
  }
  return names;
}

coordinator::StatusSnapshot SnapshotOf(size_t engines, size_t epochs, size_t name_bytes) {
  coordinator::StatusSnapshot snapshot;
  for (size_t i = 0; i < engines; ++i) {
    coordinator::EngineStatus engine;
    engine.name = std::to_string(i) + std::string(name_bytes, 'e');
    snapshot.engines.push_back(engine);
  }
  std::vector<std::string> names;
  for (const auto& engine : snapshot.engines) names.push_back(engine.name);
  for (size_t i = 0; i < epochs; ++i) {
    coordinator::EpochStatus epoch;
    epoch.epoch = Epoch(epochs - i);
    epoch.engines = names;
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

TEST(StatusMessage, OfTenThousandEnginesNamesEachOnceHoweverManyEpochsThereAre) {
  coordinator::StatusSnapshot snapshot = SnapshotOf(10'000, 256, 20);
  v1::StatusResponse epochs;
  const v1::StatusResponse status = StatusMessageOf(snapshot, EngineForm::kRuns);
  ASSERT_EQ(status.epochs_size(), 256);
  size_t named = static_cast<size_t>(status.engine_names_size());
  for (const auto& epoch : status.epochs()) {
    named += static_cast<size_t>(epoch.engines_size() + epoch.left_out_size());
    *epochs.add_epochs() = epoch;
  }
  EXPECT_EQ(named, 0u) << "beside the engines' own";
  EXPECT_LT(epochs.ByteSizeLong(), 256u * 128);
  EXPECT_LT(status.ByteSizeLong(), 1u << 20);
  EXPECT_EQ(NamesOf(status, status.epochs(255).engine_runs()).size(), 10'000u);
}

TEST(StatusMessage, OfEpochsOfOtherEnginesIsBoundedToo) {
  coordinator::StatusSnapshot snapshot = SnapshotOf(10'000, 256, 20);
  for (size_t i = 0; i < snapshot.epochs.size(); ++i) {
    std::vector<std::string> every_other;
    for (size_t k = i % 2; k < 10'000; k += 2) every_other.push_back(snapshot.engines[k].name);
    snapshot.epochs[i].engines = every_other;
    snapshot.epochs[i].left_out = {snapshot.engines[1 - i % 2].name};
    for (size_t k = 0; k < 300; ++k) {
      snapshot.epochs[i].waiting_for.push_back(snapshot.engines[k].name + "/0: prepared");
    }
  }
  const v1::StatusResponse status = StatusMessageOf(snapshot, EngineForm::kRuns);
  ASSERT_EQ(status.epochs_size(), 256);
  EXPECT_EQ(status.engine_names_size(), 0);
  EXPECT_LT(status.ByteSizeLong(), wire::kStatusBytesMax);
}

TEST(StatusMessage, NumbersMeanTheNamesAndTheirOrder) {
  coordinator::StatusSnapshot snapshot;
  for (const char* name : {"a", "b", "c", "d"}) {
    snapshot.engines.emplace_back();
    snapshot.engines.back().name = name;
  }
  const std::vector<std::vector<std::string>> lists = {
      {"a", "b", "c", "d"}, {"b", "c"}, {"gone", "a", "b", "left", "d"}, {}, {"d", "c"}, {"gone"}};
  for (const auto& engines : lists) {
    snapshot.epochs.emplace_back();
    snapshot.epochs.back().engines = engines;
    snapshot.epochs.back().left_out = {"c", "gone"};
  }
  snapshot.epochs_left = 7;
  const v1::StatusResponse status = StatusMessageOf(snapshot, EngineForm::kRuns);
  EXPECT_EQ(status.epochs_left(), 7u);
  ASSERT_EQ(status.epochs_size(), 6);
  for (int i = 0; i < 6; ++i) {
    EXPECT_EQ(NamesOf(status, status.epochs(i).engine_runs()), lists[static_cast<size_t>(i)]);
    EXPECT_EQ(NamesOf(status, status.epochs(i).left_out_runs()),
              (std::vector<std::string>{"c", "gone"}));
  }
  EXPECT_EQ(status.engine_names_size(), 2) << "gone and left, once each";
}

TEST(StatusMessage, WhoAsksForNothingGetsWhatClientsGotBefore) {
  const coordinator::StatusQuery query = QueryOf({});
  EXPECT_TRUE(query.names_bounded);
  EXPECT_EQ(query.epochs_before, Epoch{});
  for (const size_t most : {query.epochs_max, query.lines_max, query.participants_max}) {
    EXPECT_EQ(most, std::numeric_limits<size_t>::max());
  }
  const v1::StatusResponse status = StatusMessageOf(SnapshotOf(3, 2, 4), FormOf({}));
  EXPECT_EQ(status.epochs(1).engines_size(), 3);
  EXPECT_EQ(status.epochs(1).engine_runs_size(), 0);
  EXPECT_EQ(status.engine_names_size(), 0);
}

}  // namespace
}  // namespace weightwire::rpc
