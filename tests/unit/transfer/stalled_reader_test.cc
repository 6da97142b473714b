#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/unit/transfer/fleet.h"

// Readers of the same slots, one of which is much slower than the others, under virtual time.
namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using testing::Fleet;
using testing::FleetOptions;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 400'000;  ///< some fifty slots
constexpr uint64_t kFast = 4'000'000;
constexpr uint64_t kSlow = 5'000;  ///< bytes a second: 1.6 s for a slot
constexpr milliseconds kLimit(1'500);

struct Result3 {
  std::vector<bool> ok;
  std::vector<double> ends;  ///< seconds
};

class StalledReader : public ::testing::Test {
 protected:
  static FleetOptions Options(int64_t bytes) {
    FleetOptions options;
    options.shape.source_ranks = options.source_agents = 1;
    options.shape.target_ranks = 1;
    options.engines = options.target_agents = 3;
    options.stream_bytes = {{bytes}};
    options.tuning.get_timeout = options.tuning.progress_timeout = std::chrono::minutes(5);
    return options;
  }
  /// Runs a transfer from one source to three readers; `rates` of their links.
  Result3 Run(int64_t bytes, const std::vector<uint64_t>& rates, Nanos limit) {
    fleet_.emplace(Options(bytes));
    for (size_t i = 0; i < rates.size(); ++i) {
      fleet_->network.SetNic(fleet_->target_agents[i].address,
                             {.ingress_bytes_per_second = rates[i]});
    }
    fleet_->sources[0].job.stall_limit = limit;
    fleet_->StartAll();
    Result3 result{std::vector<bool>(3), std::vector<double>(3)};
    EXPECT_TRUE(fleet_->sim.RunUntil(
        [&] {
          for (size_t i = 0; i < 3; ++i) {
            const auto& target = fleet_->targets[i];
            if (!target.result || result.ends[i] > 0) continue;
            result.ok[i] = target.result->has_value();
            result.ends[i] = std::chrono::duration<double>(fleet_->sim.Now()).count();
          }
          return std::ranges::all_of(result.ends, [](double end) { return end > 0; });
        },
        std::chrono::minutes(2)));
    for (size_t i = 0; i < 3; ++i) {
      const auto& target = fleet_->targets[i];
      EXPECT_TRUE(!result.ok[i] || target.memory.Snapshot() == target.expected);
    }
    return result;
  }
  double detached() const { return fleet_->metrics.Count("readers_detached_total"); }

  std::optional<Fleet> fleet_;
};

TEST_F(StalledReader, IsToldAndTheOthersGoOn) {
  const Result3 result = Run(kBytes, {kFast, kSlow, kFast}, kLimit);
  EXPECT_EQ(result.ok, (std::vector<bool>{true, false, true}));
  EXPECT_LT(std::max(result.ends[0], result.ends[2]), 4.0) << "80 s at its pace";
  EXPECT_EQ(detached(), 1);
  const Status& told = fleet_->targets[1].result->error();
  EXPECT_EQ(told.code(), Code::kDeadlineExceeded);
  EXPECT_THAT(told.message(), HasSubstr("go on without this one"));
  fleet_->sim.RunFor(std::chrono::minutes(10));
  EXPECT_FALSE(fleet_->sources[0].result.has_value()) << "it is not the source that decides";
  fleet_->End();
}

TEST_F(StalledReader, IsWaitedForWhereAllAreRequired) {
  const Result3 result = Run(kBytes, {kFast, kSlow, kFast}, Nanos(0));
  EXPECT_EQ(result.ok, std::vector<bool>(3, true));
  EXPECT_GT(*std::ranges::min_element(result.ends), 60.0)
      << "slots are free with their last reader";
  fleet_->End();
}

TEST_F(StalledReader, MayTakeItsTimeWithWhatHoldsUpNobody) {
  const Result3 result = Run(25'000, {kFast, kSlow, kFast}, kLimit);  // within one window
  EXPECT_EQ(result.ok, std::vector<bool>(3, true));
  EXPECT_GT(result.ends[1], 4.0);
  EXPECT_LT(result.ends[0], 1.0);
  EXPECT_EQ(detached(), 0);
  fleet_->End();
}

TEST_F(StalledReader, IsNobodyWhereAllAreSlow) {
  const Result3 result = Run(kBytes / 8, std::vector<uint64_t>(3, kSlow / 8), kLimit);
  EXPECT_EQ(result.ok, std::vector<bool>(3, true));
  EXPECT_EQ(detached(), 0);
  fleet_->End();
}

}  // namespace
}  // namespace weightwire::transfer
