#include <gtest/gtest.h>
#include <unistd.h>

#include <sstream>
#include <thread>

#include "tests/integration/fleet.h"
#include "tests/integration/harness.h"

namespace weightwire::integration {
namespace {

/// Seconds of processor time that a process has used: fields 14 and 15 of /proc/PID/stat.
double CpuSeconds(pid_t pid) {
  const std::string stat = ReadFile("/proc/" + std::to_string(pid) + "/stat");
  std::istringstream fields(stat.substr(stat.rfind(')') + 2));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

TEST(Idle, UsesLessThanAHundredthOfACore) {
  Daemon daemon;
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
  std::printf("idle: %.3f s of processor time in %lld s\n", used,
              static_cast<long long>(kWindow.count()));
  EXPECT_LT(used, 0.01 * static_cast<double>(kWindow.count()));
}

}  // namespace
}  // namespace weightwire::integration
