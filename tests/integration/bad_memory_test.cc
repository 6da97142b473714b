#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "tests/integration/bad_input.h"

namespace weightwire::integration {
namespace {

constexpr uint64_t kBytes = 48;  // a BF16 matrix of 6 × 4

client::Layout Whole() {
  client::Layout layout;
  layout.canonical = layout::CanonicalSpace{{{"w", layout::DType::kBF16, {6, 4}}}};
  layout.layout =
      layout::RankLayout{{{"w", layout::DType::kBF16, {6, 4}, {{0, {{0, 0}, {6, 4}}, 0, {4, 1}}}}}};
  return layout;
}

class BadMemory : public BadInput {
 protected:
  void SetUp() override { publisher_ = OpenPublisher(); }
  void TearDown() override {
    // Memory that was refused leaves the rank as it was: good memory can still be bound.
    const Status bound = publisher_->Bind(Whole());
    EXPECT_TRUE(bound.ok()) << bound.ToString();
    publisher_.reset();
    BadInput::TearDown();
  }

  static memory::UniqueFd Memfd(uint64_t bytes, int seals) {
    memory::UniqueFd fd(memfd_create("bad", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    EXPECT_TRUE(seals == 0 || fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
    return fd;
  }
  Status Bind(const memory::UniqueFd& fd, uint64_t bytes = kBytes, uint64_t offset = 0) {
    return publisher_->BindMemory(Whole(), fd.get(), bytes, {offset});
  }
  void ExpectReason(const Status& status, Reason reason) {
    EXPECT_EQ(CodeName(status.code()), CodeName(Code::kInvalidArgument)) << status.ToString();
    EXPECT_EQ(ReasonName(status.reason()), ReasonName(reason)) << status.ToString();
  }

  std::unique_ptr<client::Publisher> publisher_;
};

TEST_F(BadMemory, GoodMemfdIsTaken) {
  const Status bound = Bind(Memfd(kBytes, F_SEAL_SHRINK));
  EXPECT_TRUE(bound.ok()) << bound.ToString();
}

TEST_F(BadMemory, FdThatIsTooSmallIsRefused) {
  const Status status = Bind(Memfd(kBytes - 1, F_SEAL_SHRINK));
  ExpectReason(status, Reason::kMemoryTooSmall);
  EXPECT_NE(status.message().find("47"), std::string::npos) << status.message();
}

TEST_F(BadMemory, RegionThatIsTooSmallForATensorNamesIt) {
  const Status status = Bind(Memfd(kBytes - 2, F_SEAL_SHRINK), kBytes - 2);
  ExpectReason(status, Reason::kMemoryTooSmall);
  EXPECT_EQ(status.tensor(), "w");
}

TEST_F(BadMemory, UnsealedFdIsRefusedWithTheWayToSealIt) {
  const Status status = Bind(Memfd(kBytes, 0));
  ExpectReason(status, Reason::kMemoryNotSealed);
  EXPECT_NE(status.remedy().find("F_SEAL_SHRINK"), std::string::npos) << status.ToString();
}

/// Files on tmpfs know seals, but can never get one.
TEST_F(BadMemory, RegularFileIsRefused) {
  const TempDir dir;
  const std::string path = dir.Write("weights", std::string(kBytes, 'x'));
  struct statfs place {};
  ASSERT_EQ(statfs(path.c_str(), &place), 0);
  ExpectReason(Bind(memory::UniqueFd(open(path.c_str(), O_RDWR | O_CLOEXEC))),
               place.f_type == TMPFS_MAGIC ? Reason::kMemoryNotSealed : Reason::kMemoryInvalid);
}

TEST_F(BadMemory, PipeIsRefused) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const memory::UniqueFd read_end(ends[0]);
  const memory::UniqueFd write_end(ends[1]);
  ExpectReason(Bind(read_end), Reason::kMemoryInvalid);
}

TEST_F(BadMemory, OffsetOutsideTheRegionIsRefused) {
  const Status status = Bind(Memfd(kBytes, F_SEAL_SHRINK), kBytes, 0xFFFF'FFFF'FFFF'FFF0);
  ExpectReason(status, Reason::kMemoryTooSmall);
  EXPECT_EQ(status.tensor(), "w");
}

TEST_F(BadMemory, OffsetThatSplitsAnElementIsRefused) {
  const Status status = Bind(Memfd(kBytes + 1, F_SEAL_SHRINK), kBytes + 1, 1);
  ExpectReason(status, Reason::kMemoryInvalid);
  EXPECT_EQ(status.tensor(), "w");
}

TEST_F(BadMemory, PublishOfUnboundMemoryIsRefused) {
  const Status status = publisher_->Publish(Version(5));
  EXPECT_EQ(ReasonName(status.reason()), ReasonName(Reason::kNotReady)) << status.ToString();
}

}  // namespace
}  // namespace weightwire::integration
