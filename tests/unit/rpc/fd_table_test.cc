#include "server/rpc/fd_table.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>

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

TEST(FdTable, RefusesTokensThatWereNeverGiven) {
  testing::SimExecutor sim;
  FdTable table(sim);
  EXPECT_FALSE(table.Redeem(0));
  EXPECT_FALSE(table.Redeem(12345));
}

}  // namespace
}  // namespace weightwire::rpc
