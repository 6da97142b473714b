#include <fstream>

#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

class Maps : public Conformance {
 protected:
  Maps() : source(rig.MakeSide()), reader(rig.MakeSide()), endpoint(rig.Open(*reader, *source)) {}
  bool can_map() const { return reader->transport->capabilities().map; }
  std::unique_ptr<Side> source;
  std::unique_ptr<Side> reader;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_P(Maps, GivesEveryPieceInOrderOrSaysThatItCannot) {
  auto first = PatternRegion(10007, 0);
  auto second = PatternRegion(5000, 77);
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
  EXPECT_EQ(call->mapped.pieces[0].size(), 4987u);
  EXPECT_EQ(FirstDifference(call->mapped.pieces[0], 77 + 13), -1);
  EXPECT_EQ(call->mapped.pieces[1].size(), 0u);
  EXPECT_EQ(call->mapped.pieces[2].size(), 9000u);
  EXPECT_EQ(FirstDifference(call->mapped.pieces[2], 1), -1);
}

TEST_P(Maps, ShowsWhatTheOwnerWritesLater) {
  if (!can_map()) return;
  auto region = PatternRegion(5000);
  auto call = rig.Map(endpoint, source->transport->Export({{region, 0, 5000}}));
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  FillPattern({region->data(), 5000}, 123456);
  EXPECT_EQ(FirstDifference(call->mapped.pieces[0], 123456), -1);
}

TEST_P(Maps, OutlivesRevocationAndTheSession) {
  if (!can_map()) return;
  auto region = PatternRegion(5000);
  const RegionKey key = source->transport->Export({{region, 0, 5000}});
  auto call = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, key)));
  region.reset();
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  source->transport.reset();
  reader->transport.reset();
  EXPECT_EQ(FirstDifference(call->mapped.pieces[0], 0), -1);
}

TEST_P(Maps, RefusesUnknownKeys) {
  if (!can_map()) return;
  auto call = rig.Map(endpoint, {12345678, 1});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kNotFound);
}

TEST_P(Maps, MapsManyRegionsAndEachOnce) {
  if (!can_map()) return;
  // More regions than one message may carry descriptors.
  constexpr size_t kRegions = 150;
  GatherList pieces;
  for (size_t i = 0; i < kRegions; ++i) {
    pieces.push_back({PatternRegion(4096, i), i, 1000});
  }
  const RegionKey key = source->transport->Export(pieces);
  auto call = rig.Map(endpoint, key);
  auto again = rig.Map(endpoint, key);
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_TRUE(rig.WaitFor(again));
  ASSERT_EQ(call->mapped.pieces.size(), kRegions);
  for (size_t i = 0; i < kRegions; ++i) {
    ASSERT_EQ(FirstDifference(call->mapped.pieces[i], 2 * i), -1);
    ASSERT_EQ(call->mapped.pieces[i].data(), again->mapped.pieces[i].data()) << "mapped twice";
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

INSTANTIATE_TEST_SUITE_P(Transports, Maps, ::testing::ValuesIn(AllKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
