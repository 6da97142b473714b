#include "server/rpc/fd_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <vector>

#include "tests/support/sim_executor.h"

namespace weightwire::rpc {
namespace {

memory::UniqueFd SomeFd() { return memory::UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(FdTable, TokenIsGoodForOneUse) {
  testing::SimExecutor sim;
  FdTable table(sim);
  memory::UniqueFd fd = SomeFd();
  const int number = fd.get();
  const auto token = table.Put(std::move(fd));
  ASSERT_TRUE(token);
  EXPECT_NE(*token, 0u);
  auto back = table.Redeem(*token);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->get(), number);
  EXPECT_EQ(table.Redeem(*token).error().reason(), Reason::kNotRegistered);
}

TEST(FdTable, TokensExpireAndTheirFdsAreClosed) {
  testing::SimExecutor sim;
  FdTable table(sim);
  memory::UniqueFd fd = SomeFd();
  const int number = fd.get();
  const auto token = table.Put(std::move(fd));
  sim.RunFor(std::chrono::seconds(29));
  EXPECT_EQ(table.size(), 1u);
  sim.RunFor(std::chrono::seconds(1));
  EXPECT_FALSE(table.Redeem(*token));
  EXPECT_FALSE(IsOpen(number));
}

TEST(FdTable, RefusesMoreThanItsBoundAndClosesTheFd) {
  testing::SimExecutor sim;
  FdTable table(sim, {.entries_max = 3});
  std::set<uint64_t> tokens;
  for (int i = 0; i < 3; ++i) tokens.insert(*table.Put(SomeFd()));
  EXPECT_EQ(tokens.size(), 3u);
  memory::UniqueFd fd = SomeFd();
  const int number = fd.get();
  EXPECT_EQ(table.Put(std::move(fd)).error().reason(), Reason::kLimitExceeded);
  EXPECT_FALSE(IsOpen(number));
  sim.RunFor(std::chrono::seconds(30));
  EXPECT_TRUE(table.Put(SomeFd()));
}

TEST(FdTable, BoundsEachProcessAndThisOneApart) {
  testing::SimExecutor sim;
  FdTable table(sim, {.entries_max = 4, .per_process_max = 3});
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const memory::UniqueFd ends[] = {memory::UniqueFd(pair[0]), memory::UniqueFd(pair[1])};
  const auto peer = std::make_shared<const PeerProcess>(pair[0], 1);
  EXPECT_EQ(peer->key(), static_cast<uint64_t>(getpid()));
  EXPECT_FALSE(peer->Ended());
  std::vector<uint64_t> tokens;
  for (int i = 0; i < 3; ++i) tokens.push_back(*table.Put(SomeFd(), peer));
  EXPECT_EQ(table.Put(SomeFd(), peer).error().reason(), Reason::kLimitExceeded);
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(table.Put(SomeFd()));
  EXPECT_EQ(table.Put(SomeFd()).error().reason(), Reason::kLimitExceeded);
  EXPECT_TRUE(table.Redeem(tokens[0]));
  EXPECT_TRUE(table.Put(SomeFd(), peer)) << "a redeemed one counts no more";
}

TEST(FdTable, RefusesTokensThatWereNeverGiven) {
  testing::SimExecutor sim;
  FdTable table(sim);
  EXPECT_FALSE(table.Redeem(0));
  EXPECT_FALSE(table.Redeem(12345));
}

}  // namespace
}  // namespace weightwire::rpc
