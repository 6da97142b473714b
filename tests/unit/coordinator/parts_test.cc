#include <gtest/gtest.h>

#include "server/coordinator/epoch_numbers.h"
#include "server/coordinator/version_queue.h"
#include "tests/support/memory_journal.h"
#include "tests/support/sim_executor.h"

namespace weightwire::coordinator {
namespace {

using std::chrono::seconds;
using weightwire::testing::MemoryJournal;
using weightwire::testing::SimExecutor;

control::PublishRequest Request(uint64_t version, uint32_t rank, Nanos deadline = seconds(10)) {
  control::PublishRequest request;
  request.member = {ParticipantId(rank + 1), Incarnation(rank + 10)};
  request.version = Version(version);
  request.deadline = deadline;
  return request;
}

TEST(VersionQueue, HeadIsTheLowestCompleteVersion) {
  VersionQueue queue(4);
  EXPECT_EQ(queue.Head(2), nullptr);
  EXPECT_TRUE(queue.Add(Request(2, 0), 0, {}, 1, seconds(0)).ok());
  EXPECT_TRUE(queue.Add(Request(3, 0), 0, Version(2), 1, seconds(0)).ok());
  EXPECT_TRUE(queue.Add(Request(3, 1), 1, {}, 1, seconds(0)).ok());
  ASSERT_NE(queue.Head(2), nullptr);
  EXPECT_EQ(queue.Head(2)->version, Version(3));
  EXPECT_EQ(queue.TakeBelow({kFirstLineage, Version(3)}).size(), 1u);
  EXPECT_EQ(queue.versions().size(), 1u);
}

TEST(VersionQueue, DeadlineIsTheEarliestOfTheRanks) {
  VersionQueue queue(4);
  EXPECT_TRUE(queue.Add(Request(1, 0, seconds(9)), 0, {}, 1, seconds(0)).ok());
  EXPECT_TRUE(queue.Add(Request(1, 1, seconds(5)), 1, {}, 1, seconds(1)).ok());
  EXPECT_EQ(*queue.NextDeadline(), seconds(6));
  EXPECT_TRUE(queue.TakeExpired(seconds(5)).empty());
  EXPECT_EQ(queue.TakeExpired(seconds(6)).size(), 1u);
  EXPECT_EQ(queue.floor().version, Version(1)) << "a version that was given up does not come back";
}

TEST(VersionQueue, RunningVersionsStay) {
  VersionQueue queue(1);
  EXPECT_TRUE(queue.Add(Request(1, 0), 0, {}, 1, seconds(0)).ok());
  queue.Find(Version(1))->running = true;
  EXPECT_TRUE(queue.TakeWaiting().empty());
  EXPECT_TRUE(queue.TakeExpired(seconds(99)).empty());
  EXPECT_EQ(queue.RunningExpired(seconds(99))->version, Version(1));
  EXPECT_TRUE(queue.Add(Request(2, 0), 0, Version(1), 1, seconds(0)).ok());
  EXPECT_EQ(queue.Add(Request(3, 0), 0, Version(2), 1, seconds(0)).reason(),
            Reason::kLimitExceeded);
}

TEST(VersionQueue, NewProcessCannotJoinARunningVersion) {
  VersionQueue queue(2);
  EXPECT_TRUE(queue.Add(Request(1, 0), 0, {}, 1, seconds(0)).ok());
  queue.Find(Version(1))->running = true;
  auto other = Request(1, 0);
  other.member.incarnation = Incarnation(99);
  EXPECT_EQ(queue.Add(other, 0, {}, 2, seconds(0)).reason(), Reason::kNotReady);
  EXPECT_EQ(queue.Find(Version(1))->ranks.at(0), Request(1, 0).member);
}

TEST(EpochNumbers, RiseWithoutGapsAboveTheFirst) {
  SimExecutor sim;
  MemoryJournal journal(sim);
  int more = 0;
  EpochNumbers numbers(
      Epoch(40), JournalId(7), journal, [&] { ++more; }, [](const Status&) { FAIL(); });
  EXPECT_FALSE(numbers.Take().has_value());
  sim.RunUntilIdle();
  EXPECT_EQ(more, 1);
  uint64_t expected = 40;
  for (int i = 0; i < 5'000; ++i) {
    const auto number = numbers.Take();
    ASSERT_TRUE(number.has_value());
    EXPECT_EQ(number->value, expected++);
    EXPECT_LT(*number, std::get<ReserveRecord>(journal.durable().back()).limit);
    sim.RunUntilIdle();
  }
}

TEST(EpochNumbers, FailedReservationIsTold) {
  SimExecutor sim;
  MemoryJournal journal(sim);
  journal.FailNext(true);
  Status failed;
  EpochNumbers numbers(
      Epoch(1), JournalId(7), journal, [] { FAIL(); }, [&](const Status& why) { failed = why; });
  numbers.Reserve();
  sim.RunUntilIdle();
  EXPECT_EQ(failed.reason(), Reason::kJournalFailed);
  EXPECT_FALSE(numbers.Take().has_value());
}

}  // namespace
}  // namespace weightwire::coordinator
