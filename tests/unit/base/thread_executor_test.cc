#include "server/base/thread_executor.h"

#include <gtest/gtest.h>

#include <atomic>
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

}  // namespace
}  // namespace weightwire
