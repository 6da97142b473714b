#include "server/base/thread_executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace weightwire {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

TEST(ThreadExecutor, OneThreadRunsTasksInTheOrderOfPosting) {
  ThreadExecutor strand("strand", 1);
  std::vector<int> order;
  std::promise<void> done;
  for (int i = 0; i < 1000; ++i) strand.Post([&order, i] { order.push_back(i); });
  strand.Post([&done] { done.set_value(); });
  done.get_future().get();
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(ThreadExecutor, TimersRunWhenDueAndCancelledOnesNever) {
  ThreadExecutor strand("strand", 1);
  std::promise<Nanos> ran;
  const Nanos started = SystemClock().Now();
  std::atomic<bool> cancelled_ran = false;
  const auto timer = strand.PostAfter(milliseconds(5), [&] { cancelled_ran = true; });
  strand.PostAfter(milliseconds(20), [&ran] { ran.set_value(SystemClock().Now()); });
  strand.Cancel(timer);
  EXPECT_GE(ran.get_future().get() - started, milliseconds(20));
  EXPECT_FALSE(cancelled_ran);
}

// Both timers are due when the strand comes to them: the second one waits in the queue already when
// the first one cancels it.
TEST(ThreadExecutor, ATimerThatIsDueAndWaitsCanStillBeCancelledOnItsStrand) {
  ThreadExecutor strand("strand", 1);
  std::promise<void> entered;
  std::promise<void> leave;
  std::promise<void> last;
  bool cancelled_ran = false;
  strand.Post([&] {
    entered.set_value();
    leave.get_future().get();
  });
  entered.get_future().get();
  Executor::TimerId second = 0;
  strand.PostAfter(milliseconds(1), [&] { strand.Cancel(second); });
  second = strand.PostAfter(milliseconds(2), [&] { cancelled_ran = true; });
  strand.PostAfter(milliseconds(3), [&] { last.set_value(); });
  const Nanos due = SystemClock().Now() + milliseconds(3);
  while (SystemClock().Now() < due) std::this_thread::yield();
  leave.set_value();
  last.get_future().get();
  EXPECT_FALSE(cancelled_ran);
}

TEST(ThreadExecutor, StopDropsWhatIsQueuedAndFreesIt) {
  auto held = std::make_shared<int>(1);
  std::promise<void> entered;
  std::promise<void> leave;
  {
    ThreadExecutor strand("strand", 1);
    strand.Post([&] {
      entered.set_value();
      leave.get_future().get();
    });
    entered.get_future().get();
    strand.Post([held] { FAIL() << "ran after Stop"; });
    strand.PostAfter(hours(1), [held] {});
    std::thread stopper([&strand] { strand.Stop(); });
    while (held.use_count() > 1) std::this_thread::yield();  // Stop frees before it joins
    leave.set_value();
    stopper.join();
    strand.Post([held] {});
  }
  EXPECT_EQ(held.use_count(), 1);
}

TEST(ThreadExecutor, PoolRunsTasksAtTheSameTime) {
  ThreadExecutor pool("pool", 2);
  std::promise<void> a;
  std::promise<void> b;
  std::promise<void> done;
  pool.Post([&] {
    a.set_value();
    b.get_future().get();
    done.set_value();
  });
  pool.Post([&] {
    a.get_future().get();
    b.set_value();
  });
  done.get_future().get();
}

// Who ran a task.
std::function<void()> Note(std::vector<std::thread::id>* ran) {
  return [ran] { ran->push_back(std::this_thread::get_id()); };
}

TEST(StrandHelper, RunsWhatItsThreadPostedAndNotWithinPost) {
  ThreadExecutor strand("strand", 1);
  StrandHelper helper;
  const auto here = std::this_thread::get_id();
  std::vector<std::thread::id> ran;
  strand.Post([&] {
    ran.push_back(std::this_thread::get_id());
    strand.Post(Note(&ran));  // behind the one that waits already
    EXPECT_EQ(ran.size(), 1u);
  });
  strand.Post(Note(&ran));
  EXPECT_TRUE(ran.empty());
  helper.Run();
  EXPECT_EQ(ran, std::vector(3, here));
}

// What another thread posted runs on the strand's own, and so does all that is behind it.
TEST(StrandHelper, LeavesWhatOthersPostedAndKeepsTheOrder) {
  const auto here = std::this_thread::get_id();
  for (int round = 0; round < 200; ++round) {
    ThreadExecutor strand("strand", 1);
    StrandHelper helper;
    std::vector<std::thread::id> ran;
    std::promise<void> last;
    strand.Post([&] {
      ran.push_back(std::this_thread::get_id());
      std::thread([&] { strand.Post(Note(&ran)); }).join();
      strand.Post([&] {
        ran.push_back(std::this_thread::get_id());
        last.set_value();
      });
    });
    helper.Run();
    last.get_future().get();
    ASSERT_EQ(ran.size(), 3u);
    EXPECT_EQ(ran[0], here);
    EXPECT_NE(ran[1], here);
    EXPECT_NE(ran[2], here);
  }
}

// That thread sleeps without a limit when the timer is set from here.
TEST(StrandHelper, ATimerThatATaskSetIsDueOnTheStrandsOwnThread) {
  ThreadExecutor strand("strand", 1);
  StrandHelper helper;
  std::promise<std::thread::id> ran;
  strand.Post([&] {
    strand.PostAfter(milliseconds(1), [&ran] { ran.set_value(std::this_thread::get_id()); });
  });
  helper.Run();
  EXPECT_NE(ran.get_future().get(), std::this_thread::get_id());
}

TEST(StrandHelper, WhatATaskPostsToAnotherStrandRunsThere) {
  ThreadExecutor one("one", 1);
  ThreadExecutor other("other", 1);
  StrandHelper helper;
  std::promise<std::thread::id> ran;
  one.Post([&] { other.Post([&ran] { ran.set_value(std::this_thread::get_id()); }); });
  helper.Run();
  EXPECT_NE(ran.get_future().get(), std::this_thread::get_id());
}

TEST(StrandHelper, WhatWasPostedRunsWhenTheHelperGoes) {
  ThreadExecutor strand("strand", 1);
  bool ran = false;
  {
    StrandHelper helper;
    strand.Post([&ran] { ran = true; });
  }
  EXPECT_TRUE(ran);
}

TEST(StrandHelper, StopDropsWhatWasPostedAndWaitsForWhatRunsElsewhere) {
  ThreadExecutor strand("strand", 1);
  auto held = std::make_shared<int>(1);
  std::promise<void> entered;
  std::atomic<bool> left = false;
  bool dropped_ran = false;
  std::thread io([&] {
    StrandHelper helper;
    strand.Post([&] {
      strand.Post([held, &dropped_ran] { dropped_ran = true; });
      entered.set_value();
      while (held.use_count() > 1) std::this_thread::yield();  // until Stop has begun
      left = true;
    });
    helper.Run();
  });
  entered.get_future().get();
  strand.Stop();
  EXPECT_TRUE(left);
  io.join();
  EXPECT_FALSE(dropped_ran);
}

// Threads of a pool are such helpers: what they post runs one at a time and in their order, whoever
// runs it, with posts of other threads among it.
TEST(StrandHelper, ManyHelpersAndOthersKeepTheStrandAStrand) {
  constexpr int kTasks = 20'000;
  ThreadExecutor strand("strand", 1);
  ThreadExecutor pool("pool", 3);
  int ran = 0;  // unguarded: the strand's
  std::atomic<int> inside = 0;
  std::vector<int> last_of(4, -1);
  std::promise<void> done;
  const auto task = [&](size_t poster, int number) {
    return [&, poster, number] {
      EXPECT_EQ(inside.fetch_add(1), 0);
      EXPECT_LT(last_of[poster], number);
      last_of[poster] = number;
      inside.fetch_sub(1);
      if (++ran == 2 * kTasks) done.set_value();
    };
  };
  std::atomic<int> next = 0;
  for (int i = 0; i < kTasks; ++i) {
    pool.Post([&] {
      thread_local const auto poster = static_cast<size_t>(next++);
      thread_local int number = 0;
      strand.Post(task(poster, number++));
    });
    strand.Post(task(3, i));
  }
  done.get_future().get();
}

}  // namespace
}  // namespace weightwire
