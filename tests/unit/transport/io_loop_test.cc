#include "server/transport/io_loop.h"

#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

TEST(IoLoop, KeepsTheOrderOfPostsFromInsideAndOutside) {
  // Each round posts from the loop's thread first and from outside after it has.
  IoLoop loop("order");
  for (int round = 0; round < 200; ++round) {
    std::vector<int> order;
    std::atomic<bool> inside_posted{false};
    std::atomic<bool> outside_posted{false};
    loop.Post([&] {
      loop.Post([&] { order.push_back(1); });
      inside_posted = true;
      inside_posted.notify_all();
      outside_posted.wait(false);
    });
    inside_posted.wait(false);
    std::atomic<bool> done{false};
    loop.Post([&] { order.push_back(2); });
    loop.Post([&] {
      done = true;
      done.notify_all();
    });
    outside_posted = true;
    outside_posted.notify_all();
    done.wait(false);
    ASSERT_EQ(order, (std::vector<int>{1, 2}));
  }
}

TEST(IoLoop, RunsEverythingThatWasPostedBeforeItStops) {
  for (int round = 0; round < 50; ++round) {
    IoLoop loop("stop");
    std::atomic<int> run{0};
    std::function<void(int)> chain = [&](int left) {
      ++run;
      if (left > 0) loop.Post([&chain, left] { chain(left - 1); });
    };
    loop.Post([&] { chain(20); });
    loop.Stop();
    EXPECT_EQ(run, 21);
  }
}

TEST(IoLoop, RunsInPlaceAfterTheStop) {
  IoLoop loop("stopped");
  loop.Stop();
  std::thread::id thread;
  loop.Post([&] { thread = std::this_thread::get_id(); });
  EXPECT_EQ(thread, std::this_thread::get_id());
}

TEST(IoLoop, LosesNothingThatIsPostedWhileItStops) {
  for (int round = 0; round < 100; ++round) {
    IoLoop loop("race");
    std::atomic<int> run{0};
    std::thread poster([&] {
      for (int i = 0; i < 100; ++i) loop.Post([&] { ++run; });
    });
    loop.Stop();
    poster.join();
    EXPECT_EQ(run, 100);
  }
}

}  // namespace
}  // namespace weightwire::transport
