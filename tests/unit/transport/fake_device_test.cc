// The fake transport where exports and Gets are of GPU memory, on fake GPUs.
#include <gtest/gtest.h>

#include <optional>

#include "server/transport/fake/fake_transport.h"
#include "tests/support/accepting_handler.h"
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/support/sim_executor.h"

namespace weightwire::transport {
namespace {

using namespace std::chrono_literals;  // NOLINT: a test

class FakeOnGpus : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 10'007;

  void Open(const FakeOptions& options) {
    source = network.MakeTransport("source", options);
    reader = network.MakeTransport("reader", options);
    ASSERT_EQ(source->Start(&peer, Incarnation(1)), OkStatus());
    ASSERT_EQ(reader->Start(&peer, Incarnation(2)), OkStatus());
    Hello hello;
    hello.caller = Incarnation(2);
    hello.callee = Incarnation(1);
    reader->Connect("source", hello, 10s,
                    [&](Result<std::shared_ptr<Endpoint>> result) { endpoint = result.value(); });
    sim.RunFor(1s);
    ASSERT_NE(endpoint, nullptr);
  }
  static std::shared_ptr<memory::MemoryRegion> OnGpu(size_t index) {
    return testing::FakeSlabs(index)->Allocate("test", kBytes).value();
  }
  static std::shared_ptr<memory::MemoryRegion> OnHost() {
    return memory::MemoryRegion::Allocate("test", kBytes).value();
  }
  static std::byte At(uint64_t i) { return static_cast<std::byte>(i * 31 + i / 256 + 5); }
  static void Fill(const memory::MemoryRegion& region) {
    std::vector<std::byte> bytes(region.size());
    for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = At(i);
    ASSERT_EQ(device::CopyRun(region.bytes(), bytes.data(), bytes.size()), OkStatus());
  }
  static std::vector<std::byte> Content(const memory::MemoryRegion& region) {
    std::vector<std::byte> bytes(region.size());
    EXPECT_EQ(device::CopyRun({bytes.data()}, region.bytes(), bytes.size()), OkStatus());
    return bytes;
  }
  Status Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into) {
    std::optional<Status> status;
    endpoint->Get(key, offset, std::move(into), 10s, nullptr, [&](Status s) { status = s; });
    sim.RunFor(1s);
    return status.value();
  }

  testing::SimExecutor sim;
  FakeNetwork network{sim, sim, 1};
  testing::AcceptingHandler peer;
  std::unique_ptr<Transport> source;
  std::unique_ptr<Transport> reader;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_F(FakeOnGpus, AGetMovesBytesBetweenAnyTwoMemories) {
  Open({.gets_device_memory = true});
  const auto host = OnHost(), first = OnGpu(0), second = OnGpu(1);
  for (const auto& from : {host, first, second}) {
    Fill(*from);
    // Of three pieces, the middle one of host memory: 100 of 7,000 bytes, at odd places.
    const RegionKey key =
        source->Export({{from, 0, 3'001}, {host, 3'001, 100}, {from, 3'101, kBytes - 3'101}});
    Fill(*host);
    for (const auto& into : {OnHost(), OnGpu(0), OnGpu(1)}) {
      const uint64_t through_host = network.bytes_through_host();
      const std::vector<std::byte> before = Content(*into);
      ASSERT_EQ(Get(key, 13, {MutableSpan(*into, 1, 999), MutableSpan(*into, 2'000, 6'001)}),
                OkStatus());
      std::vector<std::byte> expected = before;
      for (uint64_t i = 0; i < 999; ++i) expected[1 + i] = At(13 + i);
      for (uint64_t i = 0; i < 6'001; ++i) expected[2'000 + i] = At(13 + 999 + i);
      EXPECT_EQ(Content(*into), expected);
      const bool on_gpus = from->on_device() && into->on_device();
      EXPECT_EQ(network.bytes_through_host() - through_host, on_gpus ? 100u : 7'000u);
    }
  }
}

TEST_F(FakeOnGpus, WhatALateNicWroteIsSeenOnceItWasFlushed) {
  const auto write_late = FAKE_CALL(fake_cuda_write_late);
  FakeOptions options{.gets_device_memory = true, .flush_device_writes = true};
  options.write_device = [&](device::Bytes target, device::ConstBytes from, uint64_t bytes) {
    std::vector<std::byte> here(bytes);
    WW_RETURN_IF_ERROR(device::CopyRun({here.data()}, from, bytes));
    write_late(target.at, here.data(), bytes);
    return OkStatus();
  };
  Open(options);
  const auto from = OnGpu(0), into = OnGpu(1);
  Fill(*from);
  const std::vector<std::byte> before = Content(*into);
  ASSERT_EQ(Get(source->Export({{from, 0, kBytes}}), 0, {MutableSpan(*into, 0, kBytes)}),
            OkStatus());
  EXPECT_EQ(Content(*into), before);
  ASSERT_EQ(testing::FakeDevice(0)->FlushWrites(), OkStatus());  // another GPU's
  EXPECT_EQ(Content(*into), before);
  ASSERT_EQ(testing::FakeDevice(1)->FlushWrites(), OkStatus());
  EXPECT_EQ(Content(*into), Content(*from));
}

TEST_F(FakeOnGpus, AByteOfAGpuCanBeCorrupted) {
  Open({.gets_device_memory = true});
  network.SetLink("reader", "source", {.corrupt_every_get = 1});
  const auto from = OnGpu(0), into = OnGpu(1);
  Fill(*from);
  ASSERT_EQ(Get(source->Export({{from, 0, kBytes}}), 0, {MutableSpan(*into, 0, kBytes)}),
            OkStatus());
  const auto sent = Content(*from), came = Content(*into);
  size_t wrong = 0;
  for (uint64_t i = 0; i < kBytes; ++i) wrong += sent[i] != came[i];
  EXPECT_EQ(wrong, 1u);
}

TEST_F(FakeOnGpus, AGpuThatFailsEndsTheGet) {
  Open({.gets_device_memory = true});
  const auto from = OnGpu(0), into = OnGpu(0);
  const RegionKey key = source->Export({{from, 0, kBytes}});
  FAKE_CALL(fake_cuda_fail)("ww_cuda_copy", 1);
  EXPECT_EQ(Get(key, 0, {MutableSpan(*into, 0, kBytes)}).reason(), Reason::kIoError);
  EXPECT_EQ(Get(key, 0, {MutableSpan(*into, 0, kBytes)}), OkStatus());
}

// Whose bytes they are is in the types: what knows the host alone aborts, and writes nothing.
using FakeOnGpusDeathTest = FakeOnGpus;
TEST_F(FakeOnGpusDeathTest, AHostTransportRefusesGpuMemoryOnEitherSide) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  Open({});
  const auto gpu = OnGpu(0);
  const auto host = OnHost();
  EXPECT_DEATH(source->Export({{gpu, 0, 10}}), "");
  EXPECT_DEATH(
      static_cast<void>(Get(source->Export({{host, 0, 10}}), 0, {MutableSpan(*gpu, 0, 10)})), "");
  EXPECT_DEATH(static_cast<void>(MutableSpan(*gpu, 0, 10).data()), "");
}

}  // namespace
}  // namespace weightwire::transport
