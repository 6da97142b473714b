#include <gtest/gtest.h>

#include <ctime>
#include <thread>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

/// Seconds of processor time that all threads of a process have used, to the nanosecond:
/// /proc/PID/stat counts in hundredths of a second and misses what wakes briefly.
double CpuSeconds(pid_t pid) {
  clockid_t clock{};
  timespec used{};
  EXPECT_EQ(clock_getcpuclockid(pid, &clock), 0);
  EXPECT_EQ(clock_gettime(clock, &used), 0);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

void ExpectIdle(const std::vector<std::string>& flags) {
  Daemon daemon(flags);
  Trainer trainer(daemon.agent_socket(), TinyQwen2(), MegatronTp2Pp2());
  Engine first(daemon.agent_socket(), "engine-a", TinyQwen2(), VllmTp2());
  Engine second(daemon.agent_socket(), "engine-b", TinyQwen2(), VllmTp2());
  trainer.Fill(1);
  trainer.Publish(1);
  first.Install(1, 1);
  second.Install(1, 1);
  ASSERT_TRUE(trainer.AwaitReleases(1).ok());
  daemon.AwaitStatus(
      [](const v1::StatusResponse& s) {
        return s.participants_size() == 8 && s.epochs(0).phase() == v1::EPOCH_PHASE_COMMITTED;
      },
      "eight participants and one committed epoch");
  constexpr std::chrono::seconds kWindow(10);
  const double before = CpuSeconds(daemon.pid());
  std::this_thread::sleep_for(kWindow);  // the window is what is measured
  const double used = CpuSeconds(daemon.pid()) - before;
  std::printf("idle: %.6f s of processor time in %lld s\n", used,
              static_cast<long long>(kWindow.count()));
  EXPECT_LT(used, 0.01 * static_cast<double>(kWindow.count()));
}

TEST(Idle, UsesLessThanAHundredthOfACore) { ExpectIdle({}); }

/// With a session open to itself: UCX sleeps in epoll but for its keepalive.
TEST(Idle, UsesLessThanAHundredthOfACoreOverUcx) {
#ifdef WEIGHTWIRE_UCX
  ExpectIdle({"--transports=ucx", "--ucx-tls=tcp,posix,cma"});
#else
  GTEST_SKIP() << "the plug-in of ucx is not part of this build";
#endif
}

}  // namespace
}  // namespace weightwire::integration
