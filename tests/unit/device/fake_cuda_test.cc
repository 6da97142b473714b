// The fake is as strict as a GPU: what would be a mistake there is one here.
#include <gtest/gtest.h>

#include <array>

#include "server/device/device.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::device {
namespace {

using weightwire::testing::FakeDevice;
using weightwire::testing::FakeLibrary;

TEST(FakeCudaDeathTest, KillsAHostThatFollowsADevicePointer) {
  const auto memory = FakeDevice(0)->Allocate(64).value();
  volatile std::byte* at = memory->at();
  EXPECT_DEATH(static_cast<void>(at[0]), "");
  EXPECT_DEATH(at[63] = std::byte{1}, "");
}

TEST(FakeCuda, RunsNothingBeforeSomebodyWaits) {
  const auto memory = FakeDevice(0)->Allocate(64).value();
  const std::array<std::byte, 64> content{std::byte{7}};
  std::array<std::byte, 64> seen{};
  const auto lane = FakeDevice(0)->Borrow();
  ASSERT_EQ(lane->CopyBytes(memory->at(), content.data(), 64), OkStatus());
  FAKE_CALL(fake_cuda_read)(memory->at(), seen.data(), 64);
  EXPECT_NE(seen, content);
  ASSERT_TRUE(lane->Wait().has_value());
  FAKE_CALL(fake_cuda_read)(memory->at(), seen.data(), 64);
  EXPECT_EQ(seen, content);
}

TEST(FakeCuda, CountsWhatGoesBetweenAGpuAndTheHostAndNothingElse) {
  const auto here = FakeDevice(0)->Allocate(64).value(),
             there = FakeDevice(1)->Allocate(64).value();
  std::array<std::byte, 64> host{};
  const uint64_t before = FAKE_CALL(fake_cuda_host_bytes)();
  const auto lane = FakeDevice(0)->Borrow();
  const ww_cuda_box box{1, {32}, {1}, {1}};
  ASSERT_EQ(lane->CopyBytes(here->at(), there->at(), 64), OkStatus());
  ASSERT_EQ(lane->Copy({here->at(), here->at() + 32, box, WW_OPAQUE1, WW_OPAQUE1}), OkStatus());
  ASSERT_EQ(lane->Sum({nullptr, here->at(), box, WW_OPAQUE1, WW_OPAQUE1}), OkStatus());
  ASSERT_TRUE(lane->Wait().has_value());
  EXPECT_EQ(FAKE_CALL(fake_cuda_host_bytes)(), before);
  ASSERT_EQ(lane->CopyBytes(host.data(), here->at(), 64), OkStatus());
  ASSERT_EQ(lane->Copy({lane->bounce(), here->at(), box, WW_OPAQUE1, WW_OPAQUE1}), OkStatus());
  ASSERT_TRUE(lane->Wait().has_value());
  EXPECT_EQ(FAKE_CALL(fake_cuda_host_bytes)(), before + 64 + 32);
}

// In a process of its own, as the device is lost to it afterwards.
TEST(FakeCudaDeathTest, BreaksWhenAKernelLeavesWhatItMayReach) {
  enum class Reaches { kHost, kBeyond, kOtherGpu };
  const auto breaks = [](Reaches what) {
    const auto memory = FakeDevice(0)->Allocate(64).value();
    const auto other = FakeDevice(1)->Allocate(64).value();
    std::array<std::byte, 64> unregistered{};
    const std::byte* source = what == Reaches::kHost     ? unregistered.data()
                              : what == Reaches::kBeyond ? memory->at() + 1
                                                         : other->at();
    const auto lane = FakeDevice(0)->Borrow();
    const ww_cuda_box box{1, {64}, {1}, {1}};
    const Status copied = lane->Copy({lane->scratch(), source, box, WW_OPAQUE1, WW_OPAQUE1});
    const auto waited = lane->Wait();
    const auto later = FakeDevice(0)->Allocate(64);
    std::_Exit(copied.ok() && !waited.has_value() && !later.has_value() ? 3 : 4);
  };
  EXPECT_EXIT(breaks(Reaches::kHost), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(breaks(Reaches::kBeyond), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(breaks(Reaches::kOtherGpu), ::testing::ExitedWithCode(3), "");
}

}  // namespace
}  // namespace weightwire::device
