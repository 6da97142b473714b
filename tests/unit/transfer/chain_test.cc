#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "server/transfer/notify.h"
#include "tests/unit/transfer/fleet.h"

// Engines that each read from the one before, under virtual time. Every agent's patience is shorter
// than bytes take to the end.
namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::Fleet;
using testing::FleetOptions;
using testing::HandReader;
using ::testing::HasSubstr;

constexpr Nanos kPatience = seconds(10);

FleetOptions Chain(uint32_t engines, Nanos latency) {
  FleetOptions options;
  options.shape.source_ranks = options.source_agents = 1;
  options.shape.target_ranks = 1;
  options.engines = options.target_agents = engines;
  options.chain = true;
  options.stream_bytes = {{40'003}};  // some slots, and no whole number of them
  options.tuning.progress_timeout = kPatience;
  options.tuning.get_timeout = seconds(60);
  options.link.latency = latency;
  return options;
}

/// From now on nothing passes between the two, and nobody hears of it.
void Cut(Fleet& fleet, const std::string& a, const std::string& b) {
  transport::FakeLink silent;
  silent.silent = true;
  fleet.network.SetLink(a, b, silent);
  fleet.network.SetLink(b, a, silent);
}

std::string ParticipantOf(const Fleet& fleet, size_t target) {
  return "(participant " + std::to_string(fleet.targets[target].job.participant.value) + ")";
}

/// When each target had its result, in seconds; −1: not within `limit`.
std::vector<double> EndsWithin(Fleet& fleet, Nanos limit) {
  std::vector<double> ends(fleet.targets.size(), -1);
  (void)fleet.sim.RunUntil(
      [&] {
        bool all = true;
        for (size_t i = 0; i < ends.size(); ++i) {
          if (ends[i] < 0 && fleet.targets[i].result) {
            ends[i] = std::chrono::duration<double>(fleet.sim.Now()).count();
          }
          all = all && ends[i] >= 0;
        }
        return all;
      },
      limit);
  return ends;
}

TEST(Chain, OfFiveHundredEnginesIsNoTimeout) {
  Fleet fleet(Chain(500, milliseconds(40)));
  fleet.StartAll();
  const std::vector<double> ends = EndsWithin(fleet, std::chrono::minutes(5));
  testing::ExpectArrived(fleet, 500);
  EXPECT_GT(ends.back(), 4 * std::chrono::duration<double>(kPatience).count())
      << "the last one waited longer than anybody's patience";
  fleet.End();
}

// All three mean the same: nothing comes from the third engine (of ten), and its reader says so.
TEST(Chain, NamesTheParentThatStalls) {
  enum class How { kSilent, kNeverServes, kKeepsItsBytes };
  for (const How how : {How::kSilent, How::kNeverServes, How::kKeepsItsBytes}) {
    Fleet fleet(Chain(10, milliseconds(40)));
    auto& parent = fleet.targets[2];
    if (how == How::kNeverServes) parent.relay.reset();
    if (how == How::kKeepsItsBytes) {
      // What it received, nobody tells to the job that passes it on.
      parent.relay->received = std::make_shared<SlotBitmap>();
      parent.relay->received->Abandon();
    }
    if (how == How::kSilent) Cut(fleet, "t2", "t3");
    fleet.StartAll();
    const std::vector<double> ends = EndsWithin(fleet, seconds(25));
    SCOPED_TRACE(static_cast<int>(how));
    for (size_t i = 0; i < 3; ++i) {
      ASSERT_TRUE(fleet.targets[i].result && fleet.targets[i].result->has_value()) << i;
      EXPECT_EQ(fleet.targets[i].memory.Snapshot(), fleet.targets[i].expected);
    }
    ASSERT_TRUE(fleet.targets[3].result.has_value());
    const Status& why = fleet.targets[3].result->error();
    EXPECT_THAT(why.message(), HasSubstr(ParticipantOf(fleet, 2)));
    EXPECT_EQ(why.rank(), "engine-3/0");
    EXPECT_NEAR(ends[3], how == How::kSilent ? 5 : 10, 2.5);  // no session comes about in 5 s
    for (size_t i = 4; i < 10; ++i) {
      const auto& later = fleet.targets[i].result;
      EXPECT_TRUE(!later || ends[i] > ends[3] + 7.5) << i << " blames its own parent too early";
    }
    fleet.End();
  }
}

TEST(Chain, NamesTheParentThatStallsHalfway) {
  FleetOptions options = Chain(6, milliseconds(100));
  options.stream_bytes = {{400'003}};
  Fleet fleet(options);
  fleet.StartAll();
  ASSERT_TRUE(fleet.sim.RunUntil(
      [&] {
        const auto& job = fleet.targets[5].job;
        return fleet.target_agents[5].engine->ProgressOf(job.epoch, job.participant).bytes_done > 0;
      },
      seconds(60)));
  const double cut = std::chrono::duration<double>(fleet.sim.Now()).count();
  Cut(fleet, "t2", "t3");
  const std::vector<double> ends = EndsWithin(fleet, seconds(14));
  for (size_t i = 0; i < 6; ++i) {
    if (i == 3) {
      ASSERT_TRUE(fleet.targets[i].result.has_value());
      EXPECT_THAT(fleet.targets[i].result->error().message(), HasSubstr(ParticipantOf(fleet, 2)));
      EXPECT_THAT(fleet.targets[i].result->error().message(), HasSubstr("made no progress"));
      EXPECT_NEAR(ends[i] - cut, 10, 2.5);
    } else {
      EXPECT_TRUE(!fleet.targets[i].result || fleet.targets[i].result->has_value() || i > 3) << i;
    }
  }
  fleet.End();
}

// To whom a type of message that it does not know is nonsense, which ends its session.
TEST(Chain, TellsReadersThatDoNotKnowOfWaitingNothing) {
  Fleet fleet(Chain(2, milliseconds(40)));
  fleet.targets[0].relay->assignments[0].readers = 2;
  const SourceJob& relay = *fleet.targets[0].relay;
  HandReader older(fleet, fleet.target_agents[0], relay, Incarnation(771), 0);
  HandReader newer(fleet, fleet.target_agents[0], relay, Incarnation(772),
                   transport::kFeatureHearsWaiting);
  fleet.StartTarget(0);  // whose own source never starts
  older.Open(ParticipantId(5));
  newer.Open(ParticipantId(6));
  fleet.sim.RunFor(milliseconds(6'900));
  EXPECT_TRUE(older.heard.empty());
  ASSERT_EQ(newer.heard.size(), 3u);
  for (const Notify& waiting : newer.heard) {
    EXPECT_EQ(waiting.type, NotifyType::kWaiting);
    EXPECT_EQ(waiting.slot, 0u);
  }
  // The one that waits gives up by its own patience, and no longer says that it waits.
  fleet.sim.RunFor(seconds(20));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().code(), Code::kDeadlineExceeded);
  EXPECT_LE(std::ranges::count(newer.heard, NotifyType::kWaiting, &Notify::type), 5);
}

}  // namespace
}  // namespace weightwire::transfer
