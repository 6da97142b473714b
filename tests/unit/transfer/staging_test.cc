#include "server/transfer/staging.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>

#include "tests/unit/transfer/fleet.h"

// What is foretold, against the memory that the process really has.
namespace weightwire::transfer {
namespace {

/// Bytes of this process's memfds by name.
std::map<std::string, uint64_t> MemoryFiles() {
  std::map<std::string, uint64_t> files;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat status = {};
    const std::string prefix = "/memfd:";
    if (gone || target.rfind(prefix, 0) != 0 || stat(entry.path().c_str(), &status) != 0) continue;
    target = target.substr(prefix.size(), target.find(" (deleted)") - prefix.size());
    files[target] += static_cast<uint64_t>(status.st_size);
  }
  return files;
}

TEST(Staging, PoolsAreAllocatedAsForetold) {
  testing::FleetOptions options;
  options.source_agents = options.target_agents = 1;
  options.tuning.chunk_bytes = 5'000;
  options.tuning.slots_in_pool = 5;
  const testing::Fleet fleet(options);  // two agents
  const auto files = MemoryFiles();
  EXPECT_EQ(SlotPoolSize(options.tuning).bytes(), 5u * 8'192);
  EXPECT_EQ(files.at("slots"), 2 * SlotPoolSize(options.tuning).bytes());
  EXPECT_EQ(files.at("scratch"), 2 * ScratchPoolSize(options.tuning).bytes());
}

TEST(Staging, StageIsAllocatedAsForetold) {
  layout::RankLayout rank;
  rank.tensors.resize(2);
  rank.tensors[0] = {"a", layout::DType::kBF16, {3, 5}, {}};
  rank.tensors[1] = {"b", layout::DType::kF32, {7}, {}};
  const memory::ArenaMap arena = StageArenaOf(rank).value();
  EXPECT_EQ(StageBytes(arena, 1), 64u + 28);
  EXPECT_EQ(StageBytes(arena, 2), 2 * (64u + 28));
  const auto stage = memory::StageBuffers::Make("stage-of-test", arena, 2).value();
  const auto files = MemoryFiles();
  uint64_t bytes = 0;
  for (const auto& [name, size] : files) bytes += name.rfind("stage-of-test", 0) == 0 ? size : 0;
  EXPECT_EQ(bytes, StageBytes(arena, 2));
}

TEST(Staging, NamesTheTensorThatDoesNotFit) {
  layout::RankLayout rank;
  rank.tensors.resize(1);
  rank.tensors[0] = {"huge", layout::DType::kBF16, {INT64_MAX, 2}, {}};
  EXPECT_EQ(StageArenaOf(rank).error().tensor(), "huge");
}

}  // namespace
}  // namespace weightwire::transfer
