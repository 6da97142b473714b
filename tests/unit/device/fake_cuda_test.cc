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

// In a process of its own, as the device is lost to it afterwards.
TEST(FakeCudaDeathTest, BreaksWhenAKernelLeavesWhatItMayReach) {
  const auto breaks = [](bool host) {
    const auto memory = FakeDevice(0)->Allocate(64).value();
    std::array<std::byte, 64> unregistered{};
    const std::byte* source = host ? unregistered.data() : memory->at() + 1;
    const auto lane = FakeDevice(0)->Borrow();
    const ww_cuda_box box{1, {64}, {1}, {1}};
    const Status copied = lane->Copy({lane->scratch(), source, box, WW_OPAQUE1, WW_OPAQUE1});
    const auto waited = lane->Wait();
    const auto later = FakeDevice(0)->Allocate(64);
    std::_Exit(copied.ok() && !waited.has_value() && !later.has_value() ? 3 : 4);
  };
  EXPECT_EXIT(breaks(true), ::testing::ExitedWithCode(3), "");
  EXPECT_EXIT(breaks(false), ::testing::ExitedWithCode(3), "");
}

}  // namespace
}  // namespace weightwire::device
