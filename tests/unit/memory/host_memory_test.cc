#include "server/memory/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace weightwire::memory {
namespace {

namespace fs = std::filesystem;

class HostMemory : public ::testing::Test {
 protected:
  HostMemory() { fs::remove_all(root_); }
  ~HostMemory() override { fs::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
  }
  uint64_t Limit() { return MemoryLimit(root_.string()); }

  const fs::path root_ =
      fs::path(::testing::TempDir()) / ("weightwire-groups-" + std::to_string(getpid()));
  const uint64_t machine_ = MemoryLimit("/nowhere");
};

TEST_F(HostMemory, IsTheMachinesWhereNoGroupLimitsIt) {
  EXPECT_GT(machine_, 0u);
  Write("proc/self/cgroup", "0::/pod/container");
  EXPECT_EQ(Limit(), machine_);
  Write("sys/fs/cgroup/pod/container/memory.max", "max");
  EXPECT_EQ(Limit(), machine_);
}

TEST_F(HostMemory, IsTheLeastLimitOfTheGroupAndThoseAboveIt) {
  Write("proc/self/cgroup", "0::/pod/container");
  Write("sys/fs/cgroup/pod/container/memory.max", "8388608");
  EXPECT_EQ(Limit(), 8388608u);
  Write("sys/fs/cgroup/pod/memory.max", "4194304");
  EXPECT_EQ(Limit(), 4194304u);
}

TEST_F(HostMemory, IsThatOfTheMountInAContainerWhosePathLeadsNowhere) {
  Write("proc/self/cgroup", "0::/kubepods/pod1/container");
  Write("sys/fs/cgroup/memory.max", "16777216");
  EXPECT_EQ(Limit(), 16777216u);
}

TEST_F(HostMemory, ReadsGroupsOfVersionOne) {
  Write("proc/self/cgroup", "9:name=systemd:/\n5:cpu,memory:/pod\n0::/");
  Write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "9223372036854771712");
  EXPECT_EQ(Limit(), machine_);
  Write("sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "33554432");
  EXPECT_EQ(Limit(), 33554432u);
}

}  // namespace
}  // namespace weightwire::memory
