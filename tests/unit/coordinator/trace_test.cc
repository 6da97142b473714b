#include "server/coordinator/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

epoch::Span SpanAt(const std::string& name, int64_t begin_us, int64_t duration_us) {
  epoch::Span span;
  span.name = name;
  span.begin_us = begin_us;
  span.duration_us = duration_us;
  return span;
}

/// An agent whose clock is `ahead`; calls take `down` and `up`.
EpochTrace OneRank(Nanos ahead, Nanos down, Nanos up) {
  Trace trace(seconds(100));
  trace.CommandSent("prepare", seconds(100));
  const auto begin = (seconds(100) + down + ahead) / microseconds(1);
  trace.Reported("engine-a/0", "agent", {SpanAt("prepare", begin, 5'000)},
                 seconds(100) + down + milliseconds(5) + up);
  return trace.Describe({}, {});
}

TEST(Trace, FindsTheClockOfAnAgentThatIsHoursAway) {
  for (const Nanos ahead : {Nanos(0), Nanos(std::chrono::hours(3)), Nanos(seconds(-90))}) {
    const EpochTrace trace = OneRank(ahead, milliseconds(2), milliseconds(2));
    ASSERT_EQ(trace.tracks.size(), 1u);
    const auto& track = trace.tracks[0];
    EXPECT_NEAR(track.stretches[0].begin, 0.002, 2e-6) << "calls take as long both ways";
    EXPECT_DOUBLE_EQ(track.stretches[0].seconds, 0.005);
    EXPECT_NEAR(track.error_seconds, 0.002, 2e-6);
  }
}

TEST(Trace, IsWrongByNoMoreThanItSays) {
  const EpochTrace trace = OneRank(seconds(7), milliseconds(1), milliseconds(9));
  const auto& track = trace.tracks[0];
  EXPECT_LE(std::abs(track.stretches[0].begin - 0.001), track.error_seconds + 2e-6);
  EXPECT_NEAR(track.error_seconds, 0.005, 2e-6);
}

TEST(Trace, ALaterReportNarrowsTheClock) {
  Trace trace(seconds(100));
  trace.CommandSent("prepare", seconds(100));
  trace.Reported("e/0", "agent", {SpanAt("prepare", 100'010'000, 0)}, seconds(101));
  const double wide = trace.Describe({}, {}).tracks[0].error_seconds;
  trace.CommandSent("stage", seconds(101));
  trace.Reported("e/0", "agent", {SpanAt("stage", 101'000'100, 1'000)},
                 seconds(101) + microseconds(1'200));
  const EpochTrace told = trace.Describe({}, {});
  EXPECT_LT(told.tracks[0].error_seconds, wide / 100);
  EXPECT_NEAR(told.tracks[0].stretches[1].begin, 1.0001, 2e-4);
}

TEST(Trace, IsBoundedAndCountsWhatIsOver) {
  Trace trace(seconds(1));
  for (size_t i = 0; i < Trace::kLinesMax + 7; ++i) {
    trace.Happened(seconds(1), "e/" + std::to_string(i), "staged", {});
  }
  const EpochTrace told = trace.Describe({}, {});
  EXPECT_EQ(told.events.size(), Trace::kLinesMax);
  EXPECT_EQ(told.left_off, 7u);
}

TEST(Traces, ForgetsTheOldestFirst) {
  Traces traces;
  for (uint64_t number = 1; number <= 100; ++number) traces.Keep(Epoch(number), {Trace(), {}, {}});
  EXPECT_EQ(traces.Range(), "37 to 100");
  EXPECT_EQ(traces.Find(Epoch(36)), nullptr);
  EXPECT_NE(traces.Find(Epoch(37)), nullptr);
}

TEST(CoordinatorTrace, TellsAnEpochWhoWasWaitedForAndItsTrace) {
  std::vector<Note> notes;  // outlives the fleet, which writes to it until its end
  Fleet fleet;
  fleet.options.notes = [&](const Note& note) { notes.push_back(note); };
  fleet.Restart();
  const auto trainer = fleet.Trainer(2);
  fleet.Engine("engine-a", 2);
  control::PublishRequest request{trainer[0], Version(1), false, seconds(100), {}};
  request.trace_id.fill(0xab);
  for (const auto& member : trainer) {
    request.member = member;
    fleet.coordinator->Publish(request, [](const Status& status) { EXPECT_TRUE(status.ok()); });
    fleet.Run(milliseconds(3));
    request.trace_id.fill(0xcd);
  }
  fleet.Run();
  const auto trace = fleet.coordinator->Describe(Epoch());
  ASSERT_TRUE(trace.has_value()) << trace.error().ToString();
  EXPECT_EQ(trace->status.phase, epoch::Phase::kCommitted);
  EXPECT_EQ(trace->status.trace_id[0], 0xab) << "the first rank's";
  double at = 0;
  for (const auto& step : trace->steps) {
    if (step.name != "phase") continue;
    EXPECT_NEAR(step.begin, at, 1e-6) << step.about << " follows at once";
    at = step.begin + step.seconds;
  }
  EXPECT_NEAR(at, trace->status.total_seconds, 2e-6) << "phases are all of it";
  std::map<std::string, int> happened;
  for (const auto& event : trace->events) ++happened[event.what];
  EXPECT_EQ(happened,
            (std::map<std::string, int>{
                {"prepared", 4}, {"published", 2}, {"sourced", 2}, {"staged", 2}, {"swapped", 1}}));
  EXPECT_LT(trace->events[0].at, 0) << "published before the epoch began";
  ASSERT_FALSE(notes.empty());
  EXPECT_THAT(notes.front().text, HasSubstr("publish begins, attempt 1, for engine-a"));
  EXPECT_THAT(notes.back().text, HasSubstr("committed after"));
  for (const Note& note : notes) EXPECT_EQ(note.trace_id[15], 0xab) << note.text;
}

TEST(CoordinatorTrace, AnAbortSaysWhoFailedAndTheNextAttemptIsOfTheSameTrace) {
  Fleet fleet;
  const auto trainer = fleet.Trainer(1);
  fleet.Engine("engine-a");
  fleet.Engine("engine-b");
  fleet.Agent("engine-b-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::TransferCommand>(command);
  };
  fleet.PublishAll(trainer, 1);
  fleet.Run();
  const auto running = fleet.coordinator->Describe(Epoch(1));
  ASSERT_TRUE(running.has_value());
  EXPECT_EQ(running->steps.back().about, "transferring") << "what is not over is told, too";
  ASSERT_TRUE(fleet.coordinator->Evict("engine-b", "broken").ok());
  fleet.Run();
  const auto first = fleet.coordinator->Describe(Epoch(1));
  const auto second = fleet.coordinator->Describe(Epoch(2));
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_EQ(first->status.phase, epoch::Phase::kAborted);
  EXPECT_EQ(second->status.attempt, 2u);
  EXPECT_EQ(first->status.trace_id[15], 1) << "of the history and the epoch: nobody gave one";
  EXPECT_EQ(second->status.trace_id, first->status.trace_id);
  const auto lost = std::find_if(first->events.begin(), first->events.end(),
                                 [](const auto& event) { return event.what == "lost"; });
  ASSERT_NE(lost, first->events.end());
  EXPECT_EQ(lost->who, "engine-b/0");
  EXPECT_THAT(lost->why.message(), HasSubstr("broken"));
  const auto unknown = fleet.coordinator->Describe(Epoch(77));
  ASSERT_FALSE(unknown.has_value());
  EXPECT_EQ(unknown.error().reason(), Reason::kNotRegistered);
  EXPECT_THAT(unknown.error().message(), HasSubstr("1 to 2"));
}

}  // namespace
}  // namespace weightwire::coordinator::testing
