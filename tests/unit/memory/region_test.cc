#include "server/memory/region.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "gtest/gtest.h"

namespace weightwire::memory {
namespace {

UniqueFd Memfd(off_t bytes, int seals) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), bytes), 0);
  if (seals != 0) {
    EXPECT_EQ(fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  }
  return fd;
}

Status ImportStatus(UniqueFd fd, uint64_t bytes, Access access = Access::kReadOnly) {
  auto region = MemoryRegion::Import(std::move(fd), bytes, access);
  return region.has_value() ? OkStatus() : region.error();
}

TEST(MemoryRegion, AllocatesExactlyWhatWasAskedSealedAndZero) {
  for (uint64_t bytes : {uint64_t{1}, uint64_t{4095}, uint64_t{4097}, uint64_t{5} << 20}) {
    auto region = MemoryRegion::Allocate("exact", bytes);
    ASSERT_TRUE(region.has_value());
    EXPECT_EQ((*region)->size(), bytes);
    struct stat info {};
    ASSERT_EQ(fstat((*region)->fd(), &info), 0);
    EXPECT_EQ(static_cast<uint64_t>(info.st_size), bytes);
    EXPECT_EQ(fcntl((*region)->fd(), F_GET_SEALS), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    EXPECT_EQ(fcntl((*region)->fd(), F_GETFD), FD_CLOEXEC);
    EXPECT_EQ((*region)->data()[0], std::byte{0});
    EXPECT_EQ((*region)->data()[bytes - 1], std::byte{0});
  }
}

TEST(MemoryRegion, IsPrefaulted) {
  constexpr uint64_t kBytes = 3 << 20;
  auto region = MemoryRegion::Allocate("prefault", kBytes);
  ASSERT_TRUE(region.has_value());
  struct stat info {};
  ASSERT_EQ(fstat((*region)->fd(), &info), 0);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kBytes);
}

TEST(MemoryRegion, IdsAreNeverReused) {
  uint64_t last = 0;
  for (int i = 0; i < 10; ++i) {
    auto region = MemoryRegion::Allocate("id", 1);
    ASSERT_TRUE(region.has_value());
    EXPECT_GT((*region)->id(), last);
    last = (*region)->id();
  }
}

TEST(MemoryRegion, RefusesWhatTheHostCannotHave) {
  for (uint64_t bytes : {uint64_t{1} << 50, UINT64_MAX, uint64_t{1} << 63}) {
    auto region = MemoryRegion::Allocate("absurd", bytes);
    ASSERT_FALSE(region.has_value());
    EXPECT_EQ(region.error().code(), Code::kResourceExhausted);
    EXPECT_EQ(region.error().reason(), Reason::kLimitExceeded);
    EXPECT_NE(region.error().message().find(std::to_string(bytes)), std::string::npos);
  }
  EXPECT_EQ(MemoryRegion::Allocate("nothing", 0).error().reason(), Reason::kMemoryInvalid);
}

TEST(MemoryRegion, ImportSharesThePages) {
  auto owner = MemoryRegion::Allocate("shared", 5000);
  ASSERT_TRUE(owner.has_value());
  auto copy = UniqueFd(fcntl((*owner)->fd(), F_DUPFD_CLOEXEC, 0));
  auto reader = MemoryRegion::Import(std::move(copy), 5000, Access::kReadOnly);
  ASSERT_TRUE(reader.has_value());
  std::memcpy((*owner)->data() + 4990, "weights", 7);
  EXPECT_EQ(std::memcmp((*reader)->data() + 4990, "weights", 7), 0);
  EXPECT_NE((*reader)->id(), (*owner)->id());
}

TEST(MemoryRegion, ImportMapsNoMoreThanAsked) {
  auto region = MemoryRegion::Import(Memfd(1 << 20, F_SEAL_SHRINK), 100, Access::kReadOnly);
  ASSERT_TRUE(region.has_value());
  EXPECT_EQ((*region)->size(), 100u);
}

TEST(MemoryRegion, ImportDoesNotPayForASparseFile) {
  constexpr off_t kBytes = 64 << 20;
  auto region = MemoryRegion::Import(Memfd(kBytes, F_SEAL_SHRINK), kBytes, Access::kReadOnly);
  ASSERT_TRUE(region.has_value());
  struct stat info {};
  ASSERT_EQ(fstat((*region)->fd(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0);
}

TEST(MemoryRegion, ImportRefusesUnsealedMemory) {
  for (int seals : {0, F_SEAL_GROW, F_SEAL_WRITE}) {
    const Status status = ImportStatus(Memfd(4096, seals), 4096);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_EQ(status.reason(), Reason::kMemoryNotSealed);
    EXPECT_FALSE(status.remedy().empty());
  }
  UniqueFd unsealable(memfd_create("plain", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(unsealable.get(), 4096), 0);
  EXPECT_EQ(ImportStatus(std::move(unsealable), 4096).reason(), Reason::kMemoryNotSealed);
}

TEST(MemoryRegion, ImportRefusesMemoryThatIsTooShort) {
  const Status status = ImportStatus(Memfd(4096, F_SEAL_SHRINK), 4097);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.reason(), Reason::kMemoryTooSmall);
  EXPECT_NE(status.message().find("4096"), std::string::npos);
  EXPECT_NE(status.message().find("4097"), std::string::npos);
}

TEST(MemoryRegion, ImportRefusesWhatIsNoMemfd) {
  int pipe_ends[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  UniqueFd write_end(pipe_ends[1]);
  EXPECT_EQ(ImportStatus(UniqueFd(pipe_ends[0]), 1).reason(), Reason::kMemoryInvalid);
  EXPECT_EQ(ImportStatus(UniqueFd(), 1).reason(), Reason::kMemoryInvalid);
  EXPECT_EQ(ImportStatus(Memfd(4096, F_SEAL_SHRINK), 0).reason(), Reason::kMemoryInvalid);
  // A file is refused whatever file system it lies on: by its kind, or for want of seals.
  std::string path = ::testing::TempDir() + "/weightwire-region-XXXXXX";
  UniqueFd file(mkstemp(path.data()));
  ASSERT_TRUE(file.valid());
  unlink(path.c_str());
  ASSERT_EQ(ftruncate(file.get(), 4096), 0);
  EXPECT_EQ(ImportStatus(std::move(file), 4096).code(), Code::kInvalidArgument);
}

TEST(MemoryRegion, ImportRefusesWriteAccessToAReadOnlyDescriptor) {
  UniqueFd writable = Memfd(4096, F_SEAL_SHRINK);
  const std::string path = "/proc/self/fd/" + std::to_string(writable.get());
  UniqueFd read_only(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(read_only.valid());
  const Status status = ImportStatus(std::move(read_only), 4096, Access::kReadWrite);
  EXPECT_EQ(status.reason(), Reason::kMemoryInvalid);
}

TEST(MemoryRegionDeathTest, WritingToAReadOnlyRegionFaults) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto region = MemoryRegion::Import(Memfd(4096, F_SEAL_SHRINK), 4096, Access::kReadOnly);
  ASSERT_TRUE(region.has_value());
  EXPECT_DEATH((*region)->data()[0] = std::byte{1}, "");
}

TEST(RegionSpan, ChecksItsRange) {
  auto region = MemoryRegion::Allocate("span", 1000);
  ASSERT_TRUE(region.has_value());
  auto span = SpanOf(*region, 10, 990);
  ASSERT_TRUE(span.has_value());
  EXPECT_EQ(span->data(), (*region)->data() + 10);
  EXPECT_TRUE(SpanOf(*region, 1000, 0).has_value());
  for (auto [offset, bytes] :
       {std::pair<uint64_t, uint64_t>{10, 991}, {1001, 0}, {UINT64_MAX, 2}, {1, UINT64_MAX}}) {
    auto outside = SpanOf(*region, offset, bytes);
    ASSERT_FALSE(outside.has_value());
    EXPECT_EQ(outside.error().reason(), Reason::kMemoryInvalid);
  }
}

TEST(RegionSpan, KeepsItsRegionAlive) {
  auto region = MemoryRegion::Allocate("alive", 1000);
  ASSERT_TRUE(region.has_value());
  std::weak_ptr<MemoryRegion> watch = *region;
  auto span = SpanOf(std::move(*region), 0, 1000);
  EXPECT_FALSE(watch.expired());
  span->region.reset();
  EXPECT_TRUE(watch.expired());
}

TEST(UniqueFd, ClosesOnceAndMoves) {
  int pipe_ends[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  UniqueFd read_end(pipe_ends[0]);
  {
    UniqueFd write_end(pipe_ends[1]);
    UniqueFd moved = std::move(write_end);
    EXPECT_FALSE(write_end.valid());  // NOLINT: the state after a move is the fact under test
    auto duplicate = moved.Duplicate();
    ASSERT_TRUE(duplicate.has_value());
    EXPECT_EQ(fcntl(duplicate->get(), F_GETFD), FD_CLOEXEC);
    moved = std::move(*duplicate);
  }
  char byte;
  EXPECT_EQ(read(read_end.get(), &byte, 1), 0) << "a write end is still open";
}

}  // namespace
}  // namespace weightwire::memory
