#include "server/base/fair_queue.h"

#include <gtest/gtest.h>

#include <vector>

namespace weightwire {
namespace {

// Users that ask again as soon as they were served.
class Greedy {
 public:
  void Add(double cost) {
    costs_.push_back(cost);
    turns_.emplace_back();
    Ask(costs_.size() - 1);
  }
  std::vector<int> Serve(int times) {
    std::vector<int> served(costs_.size(), 0);
    for (; times > 0; --times) {
      const size_t user = queue_.Pop();
      ++served[user];
      Ask(user);
    }
    return served;
  }

 private:
  void Ask(size_t user) { queue_.Push(turns_[user], costs_[user], user); }
  FairQueue<size_t> queue_;
  std::vector<double> costs_;
  std::vector<FairQueue<size_t>::Turn> turns_;
};

TEST(FairQueue, ServesInInverseProportionToCost) {
  Greedy users;
  for (double cost : {1.0, 0.25, 0.5}) users.Add(cost);
  EXPECT_EQ(users.Serve(70), (std::vector<int>{10, 40, 20}));
}

TEST(FairQueue, OwesNothingToWhoComesLateAndStarvesNobody) {
  Greedy users;
  for (double cost : {1.0, 0.25, 0.5}) users.Add(cost);
  users.Serve(700);
  users.Add(1);
  const std::vector<int> served = users.Serve(80);
  EXPECT_NEAR(served[1], 40, 1);
  EXPECT_NEAR(served[3], 10, 1);
}

TEST(FairQueue, CountsWhatWasServedWithoutWaiting) {
  FairQueue<int> queue;
  FairQueue<int>::Turn first;
  FairQueue<int>::Turn second;
  for (int i = 0; i < 3; ++i) queue.Pass(first, 1);
  queue.Push(first, 1, 1);
  queue.Push(second, 1, 2);
  EXPECT_EQ(queue.Pop(), 2);
  EXPECT_EQ(queue.Pop(), 1);
}

TEST(FairQueue, EqualTurnsAreServedInOrderAndCancelledOnesNot) {
  FairQueue<int> queue;
  FairQueue<int>::Turn turn;
  queue.Push(turn, 0, 1);
  const uint64_t second = queue.Push(turn, 0, 2);
  queue.Push(turn, 0, 3);
  EXPECT_NE(second, 0u);
  queue.Cancel(second);
  queue.Cancel(12'345);
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), 3);
  EXPECT_TRUE(queue.empty());
}

}  // namespace
}  // namespace weightwire
