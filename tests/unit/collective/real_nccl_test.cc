// client/collective/nccl_abi.h against the nccl.h of this machine, and its libnccl.so.2, which
// loads without a GPU. Events are the fake's: nothing is put on a stream here.
#include <gtest/gtest.h>
#include <nccl.h>

#include "client/collective/collective.h"

namespace weightwire::collective::nccl {
namespace {

static_assert(kSuccess == ncclSuccess && kSystemError == ncclSystemError &&
              kInvalidArgument == ncclInvalidArgument && kInvalidUsage == ncclInvalidUsage &&
              kRemoteError == ncclRemoteError && kInProgress == ncclInProgress &&
              kUint8 == ncclUint8);
static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));
static_assert(kVersionMin == NCCL_VERSION(2, 18, 0));
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(
    std::is_same_v<decltype(&ncclSend), ncclResult_t (*)(const void*, size_t, ncclDataType_t, int,
                                                         ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclRecv), ncclResult_t (*)(void*, size_t, ncclDataType_t,
                                                                   int, ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclBroadcast),
                             ncclResult_t (*)(const void*, void*, size_t, ncclDataType_t, int,
                                              ncclComm_t, cudaStream_t)>);
static_assert(std::is_same_v<decltype(&ncclCommInitRankConfig),
                             ncclResult_t (*)(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*)>);

TEST(RealNccl, OurConfigurationIsTheBeginningOfItsOwn) {
  EXPECT_LE(sizeof(Config), sizeof(ncclConfig_t));
  EXPECT_EQ(offsetof(Config, magic), offsetof(ncclConfig_t, magic));
  EXPECT_EQ(offsetof(Config, version), offsetof(ncclConfig_t, version));
  EXPECT_EQ(offsetof(Config, blocking), offsetof(ncclConfig_t, blocking));
  EXPECT_EQ(offsetof(Config, net_name), offsetof(ncclConfig_t, netName));
  EXPECT_EQ(offsetof(Config, split_share), offsetof(ncclConfig_t, splitShare));
  ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_EQ(ours.max_ctas, theirs.maxCTAs);
  EXPECT_EQ(ours.split_share, theirs.splitShare);
  EXPECT_EQ(ours.unused, NCCL_CONFIG_UNDEF_INT);
}

// Without a GPU forming fails, with one it succeeds; both end, and leave the state that fits.
TEST(RealNccl, LoadsGivesAnIdAndEndsForming) {
  auto opened = Collective::Open({NCCL_LIBRARY, FAKE_NCCL_LIBRARY, 0, std::chrono::seconds(60)});
  ASSERT_TRUE(opened) << opened.error().ToString();
  auto id = (*opened)->MakeUniqueId();
  ASSERT_TRUE(id) << id.error().ToString();
  const Status formed = (*opened)->Form(*id, 0, 1, 1, std::chrono::seconds(60));
  EXPECT_NE(formed.code(), Code::kDeadlineExceeded) << formed.ToString();
  EXPECT_NE(formed.code(), Code::kInvalidArgument) << "it understands our configuration";
  EXPECT_EQ((*opened)->state(), formed.ok() ? State::kReady : State::kUnformed);
}

}  // namespace
}  // namespace weightwire::collective::nccl
