#include <algorithm>
#include <future>

#include "gtest/gtest.h"
#include "server/transport/shm/shm_transport.h"
#include "tests/support/accepting_handler.h"
#include "tests/support/to_itself.h"

// An agent that reads from itself over a transport that maps memory.
namespace weightwire::transport {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);

Result<MappedList> MapAll(Endpoint& endpoint, RegionKey key) {
  std::promise<Result<MappedList>> mapped;
  endpoint.Map(key, kTimeout, [&](auto result) { mapped.set_value(std::move(result)); });
  return mapped.get_future().get();
}

std::shared_ptr<memory::MemoryRegion> Patterned() {
  auto region = memory::MemoryRegion::Allocate("own", 10'000).value();
  for (size_t i = 0; i < region->size(); ++i) region->data()[i] = std::byte(i * 7);
  return region;
}

void Revoke(Transport& transport, RegionKey key) {
  std::promise<void> revoked;
  transport.Revoke(key, [&] { revoked.set_value(); });
  revoked.get_future().get();
}

TEST(OwnRegion, IsSeenWhereItLiesAndHeldOnlyWhileItIsUsed) {
  testing::AcceptingHandler handler;
  const auto transport = MakeShmTransport({});
  ASSERT_EQ(transport->Start(&handler, Incarnation(5)), OkStatus());
  const auto endpoint = testing::ToItself(*transport);
  ASSERT_NE(endpoint, nullptr);
  auto region = Patterned();
  const std::weak_ptr<memory::MemoryRegion> alive = region;
  const RegionKey key = transport->Export({{region, 10, 100}, {region, 7'000, 3'000}});

  auto mapped = MapAll(*endpoint, key);
  ASSERT_TRUE(mapped.has_value()) << mapped.error().ToString();
  ASSERT_EQ(mapped->pieces.size(), 2u);
  EXPECT_EQ(mapped->pieces[0].at.at, region->data() + 10);
  EXPECT_EQ(mapped->pieces[1].at.at, region->data() + 7'000);

  std::vector<std::byte> into(200);
  std::promise<Status> got;
  endpoint->Get(key, 50, {{into.data(), into.size()}}, kTimeout, nullptr,
                [&](Status status) { got.set_value(std::move(status)); });
  ASSERT_EQ(got.get_future().get(), OkStatus());
  EXPECT_TRUE(std::equal(into.begin(), into.begin() + 50, region->data() + 60));
  EXPECT_TRUE(std::equal(into.begin() + 50, into.end(), region->data() + 7'000));

  Revoke(*transport, key);
  region.reset();
  EXPECT_FALSE(alive.expired());  // by what is mapped
  mapped->hold.reset();
  // The exporter holds what a Get reads until it hears of its end, which the session tells it
  // before this.
  EXPECT_FALSE(MapAll(*endpoint, key).has_value());
  EXPECT_TRUE(alive.expired());  // though the session goes on

  // The session still serves other memory.
  const auto other = Patterned();
  const RegionKey other_key = transport->Export({{other, 0, other->size()}});
  EXPECT_TRUE(MapAll(*endpoint, other_key).has_value());
  Revoke(*transport, other_key);
}

// Ids are of a process: the same one from elsewhere names other memory.
TEST(OwnRegion, AnotherTransportsRegionIsMapped) {
  testing::AcceptingHandler handler;
  testing::AcceptingHandler other_handler;
  const auto transport = MakeShmTransport({});
  const auto other = MakeShmTransport({});
  ASSERT_EQ(transport->Start(&handler, Incarnation(5)), OkStatus());
  ASSERT_EQ(other->Start(&other_handler, Incarnation(6)), OkStatus());
  Hello hello;
  hello.caller = Incarnation(5);
  hello.callee = Incarnation(6);
  std::promise<Result<std::shared_ptr<Endpoint>>> connected;
  transport->Connect(other->address(), hello, kTimeout,
                     [&](auto result) { connected.set_value(std::move(result)); });
  const auto endpoint = connected.get_future().get();
  ASSERT_TRUE(endpoint.has_value());
  const auto region = Patterned();
  const RegionKey key = other->Export({{region, 0, region->size()}});
  const auto mapped = MapAll(**endpoint, key);
  ASSERT_TRUE(mapped.has_value());
  EXPECT_NE(mapped->pieces[0].at.at, region->data());
  EXPECT_TRUE(std::equal(region->data(), region->data() + region->size(), mapped->pieces[0].at.at));
}

}  // namespace
}  // namespace weightwire::transport
