#include <fstream>

#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

class Maps : public Conformance {
 protected:
  Maps() : source(rig.MakeSide()), reader(rig.MakeSide()), endpoint(rig.Open(*reader, *source)) {}
  /// In the memory that this kind of test is about.
  std::shared_ptr<memory::MemoryRegion> Pattern(uint64_t bytes, uint64_t first_index = 0) {
    return rig.kind().gpus == 0 ? PatternRegion(bytes, first_index)
                                : PatternSlab(regions_made++ % rig.kind().gpus, bytes, first_index);
  }
  size_t regions_made = 0;
  bool can_map() const { return reader->transport->capabilities().map; }
  std::unique_ptr<Side> source;
  std::unique_ptr<Side> reader;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_P(Maps, GivesEveryPieceInOrderOrSaysThatItCannot) {
  auto first = Pattern(10007, 0);
  auto second = Pattern(5000, 77);
  const RegionKey key =
      source->transport->Export({{second, 13, 4987}, {first, 0, 0}, {first, 1, 9000}});
  auto call = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  if (!can_map()) {
    EXPECT_EQ(call->status.code(), Code::kUnimplemented);
    return;
  }
  ASSERT_EQ(call->status, OkStatus());
  ASSERT_EQ(call->mapped.pieces.size(), 3u);
  EXPECT_EQ(call->mapped.pieces[0].bytes, 4987u);
  EXPECT_EQ(FirstDifference(BytesOf(call->mapped.pieces[0]), 77 + 13), -1);
  EXPECT_EQ(call->mapped.pieces[1].bytes, 0u);
  EXPECT_EQ(call->mapped.pieces[2].bytes, 9000u);
  EXPECT_EQ(FirstDifference(BytesOf(call->mapped.pieces[2]), 1), -1);
}

TEST_P(Maps, ShowsWhatTheOwnerWritesLater) {
  if (!can_map()) return;
  auto region = Pattern(5000);
  auto call = rig.Map(endpoint, source->transport->Export({{region, 0, 5000}}));
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  std::vector<std::byte> later(5000);
  FillPattern(later, 123456);
  ASSERT_EQ(device::CopyRun(region->bytes(), later.data(), later.size()), OkStatus());
  EXPECT_EQ(FirstDifference(BytesOf(call->mapped.pieces[0]), 123456), -1);
}

TEST_P(Maps, OutlivesRevocationAndTheSession) {
  if (!can_map()) return;
  auto region = Pattern(5000);
  const RegionKey key = source->transport->Export({{region, 0, 5000}});
  auto call = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, key)));
  region.reset();
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  source->transport.reset();
  reader->transport.reset();
  EXPECT_EQ(FirstDifference(BytesOf(call->mapped.pieces[0]), 0), -1);
}

TEST_P(Maps, RefusesUnknownKeys) {
  if (!can_map()) return;
  const RegionKey key = source->transport->Export({{Pattern(5000), 0, 5000}});
  for (RegionKey wrong : {RegionKey{12345678, 1}, RegionKey{key.id, key.generation + 1}}) {
    auto call = rig.Map(endpoint, wrong);
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status.code(), Code::kNotFound);
    EXPECT_EQ(call->status.reason(), Reason::kStaleIncarnation);
  }
}

TEST_P(Maps, MapsManyRegionsAndEachOnce) {
  if (!can_map()) return;
  // More regions than one message may carry descriptors.
  constexpr size_t kRegions = 150;
  GatherList pieces;
  for (size_t i = 0; i < kRegions; ++i) {
    pieces.push_back({i % 3 == 2 ? PatternRegion(4096, i) : Pattern(4096, i), i, 1000});
  }
  const RegionKey key = source->transport->Export(pieces);
  auto call = rig.Map(endpoint, key);
  auto again = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_TRUE(rig.WaitFor(again));
  ASSERT_EQ(call->mapped.pieces.size(), kRegions);
  for (size_t i = 0; i < kRegions; ++i) {
    ASSERT_EQ(FirstDifference(BytesOf(call->mapped.pieces[i]), 2 * i), -1);
    ASSERT_EQ(call->mapped.pieces[i].at.at, again->mapped.pieces[i].at.at) << "mapped twice";
  }
}

size_t MappingsNamed(const std::string& name) {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find(name) != std::string::npos;
  return count;
}

TEST_P(Maps, MemoryGoesWhenTheOwnerAndTheReaderHaveLetItGo) {
  if (!can_map()) return;
  const std::string name = "maps-go-" + rig.kind().name;
  auto region = memory::MemoryRegion::Allocate(name, 8192);
  ASSERT_TRUE(region.has_value());
  const RegionKey key = source->transport->Export({{*region, 0, 8192}});
  auto call = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, key)));
  region->reset();
  EXPECT_GE(MappingsNamed(name), 1u);
  call->mapped = {};
  // The next request makes the exporter tell its reader; its answer comes after that.
  ASSERT_TRUE(rig.WaitFor(rig.Map(endpoint, key)));
  EXPECT_EQ(MappingsNamed(name), 0u);
}

TEST_P(Maps, GivesAGpusMemoryOnlyWhereItCan) {
  const std::string& backend = rig.kind().backend;
  if (backend != "shm" && backend != "cuda_ipc") return;  // nobody may export it there
  auto slab = PatternSlab(0, 5000, 0);
  const RegionKey key = source->transport->Export({{slab, 0, 5000}});
  if (!reader->transport->capabilities().maps_device_memory) {
    auto call = rig.Map(endpoint, key);
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status.code(), Code::kUnimplemented);
  }
  // Nobody can Get it.
  std::vector<std::byte> buffer(100, std::byte{0xee});
  auto get = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(get));
  EXPECT_EQ(get->status.code(), Code::kUnimplemented);
  EXPECT_EQ(buffer, std::vector<std::byte>(100, std::byte{0xee}));
  EXPECT_EQ(endpoint->Notify(std::as_bytes(std::span("on", 2))), OkStatus());
}

std::vector<Kind> KindsAndMemories() {
  std::vector<Kind> kinds = AllKinds();
  kinds.push_back({.name = "cuda_ipc_of_a_gpu", .backend = "cuda_ipc", .gpus = 1});
  kinds.push_back({.name = "cuda_ipc_of_two_gpus", .backend = "cuda_ipc", .gpus = 2});
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Transports, Maps, ::testing::ValuesIn(KindsAndMemories()), KindName);

}  // namespace
}  // namespace weightwire::conformance
