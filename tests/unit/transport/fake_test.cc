#include "server/transport/fake/fake_transport.h"

#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/sim_executor.h"

namespace weightwire::transport {
namespace {

using namespace std::chrono_literals;  // NOLINT: a test

class Peer final : public Handler {
 public:
  Result<Ticket> OnHello(const CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<Endpoint> endpoint) override { accepted = endpoint; }
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte> message) override {
    notifies.emplace_back(reinterpret_cast<const char*>(message.data()), message.size());
  }
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status& why) override { closed = why; }
  std::shared_ptr<Endpoint> accepted;
  std::vector<std::string> notifies;
  std::optional<Status> closed;
};

class FakeNet : public ::testing::Test {
 protected:
  explicit FakeNet(uint64_t seed = 1) : network(sim, sim, seed) {
    region = *memory::MemoryRegion::Allocate("fake", kBytes);
    for (uint64_t i = 0; i < kBytes; ++i) region->data()[i] = static_cast<std::byte>(i * 31 + 5);
    source = network.MakeTransport("source");
    reader = network.MakeTransport("reader");
    EXPECT_EQ(source->Start(&source_peer, Incarnation(1)), OkStatus());
    EXPECT_EQ(reader->Start(&reader_peer, Incarnation(2)), OkStatus());
    key = source->Export({{region, 0, kBytes}});
  }
  Status Open(Nanos timeout = 10s) {
    Status status;
    Hello hello;
    hello.caller = Incarnation(2);
    hello.callee = Incarnation(1);
    reader->Connect("source", hello, timeout, [&](Result<std::shared_ptr<Endpoint>> result) {
      if (result.has_value()) {
        endpoint = *result;
      } else {
        status = result.error();
      }
    });
    sim.RunFor(timeout);
    return status;
  }
  struct Got {
    std::vector<std::byte> bytes;
    std::optional<Status> status;
    Nanos at{0};
  };
  std::shared_ptr<Got> Get(uint64_t offset, size_t bytes, Nanos timeout = 100s) {
    auto got = std::make_shared<Got>();
    got->bytes.resize(bytes);
    endpoint->Get(key, offset, {got->bytes}, timeout, nullptr, [this, got](Status status) {
      got->status = status;
      got->at = sim.Now();
    });
    return got;
  }
  size_t WrongBytes(const Got& got, uint64_t offset) {
    size_t wrong = 0;
    for (size_t i = 0; i < got.bytes.size(); ++i) {
      wrong += got.bytes[i] != static_cast<std::byte>((offset + i) * 31 + 5);
    }
    return wrong;
  }
  void SetLink(FakeLink link) { network.SetLink("reader", "source", link); }

  static constexpr uint64_t kBytes = 100'000;
  testing::SimExecutor sim;
  FakeNetwork network;
  Peer source_peer;
  Peer reader_peer;
  std::unique_ptr<Transport> source;
  std::unique_ptr<Transport> reader;
  std::shared_ptr<memory::MemoryRegion> region;
  RegionKey key;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_F(FakeNet, TimeIsLatencyPlusBytesOverBandwidth) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.latency = 10ms, .bytes_per_second = 1'000'000});
  const Nanos start = sim.Now();
  auto first = Get(0, 50'000);
  auto second = Get(50'000, 50'000);
  sim.RunUntilIdle();
  EXPECT_EQ(first->status, OkStatus());
  EXPECT_EQ(first->at - start, 20ms + 50ms);
  EXPECT_EQ(second->at - start, 20ms + 100ms) << "one link carries one payload after another";
  EXPECT_EQ(WrongBytes(*second, 50'000), 0u);
}

TEST_F(FakeNet, JitterReordersGetsButNeverNotifies) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.latency = 1ms, .get_jitter_max = 50ms});
  std::vector<std::shared_ptr<Got>> gets;
  std::vector<std::string> sent;
  for (int i = 0; i < 50; ++i) {
    gets.push_back(Get(0, 10));
    sent.push_back(std::to_string(i));
    ASSERT_EQ(endpoint->Notify(std::as_bytes(std::span(sent.back()))), OkStatus());
    if (i == 25) SetLink({.latency = 0ms, .get_jitter_max = 50ms});
  }
  sim.RunUntilIdle();
  EXPECT_EQ(source_peer.notifies, sent);
  bool overtaken = false;
  for (size_t i = 1; i < gets.size(); ++i) overtaken |= gets[i]->at < gets[i - 1]->at;
  EXPECT_TRUE(overtaken);
}

TEST_F(FakeNet, DropsTheConnectionAtTheNthOperation) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.latency = 1ms, .drop_at_operation = 3});
  auto first = Get(0, 10);
  sim.RunUntilIdle();
  ASSERT_EQ(endpoint->Notify({}), OkStatus());
  auto third = Get(0, 10);
  sim.RunUntilIdle();
  EXPECT_EQ(first->status, OkStatus());
  EXPECT_EQ(third->status->code(), Code::kUnavailable);
  EXPECT_EQ(reader_peer.closed->code(), Code::kUnavailable);
  EXPECT_EQ(source_peer.closed->code(), Code::kUnavailable);
  ASSERT_EQ(Open(), OkStatus()) << "a new session works";
}

TEST_F(FakeNet, CorruptsOneByteOfEveryNthGet) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.corrupt_every_get = 3});
  for (int i = 1; i <= 9; ++i) {
    auto got = Get(7, 5000);
    sim.RunUntilIdle();
    ASSERT_EQ(got->status, OkStatus());
    EXPECT_EQ(WrongBytes(*got, 7), i % 3 == 0 ? 1u : 0u) << i;
  }
}

TEST_F(FakeNet, CorruptsWithTheProbabilityAsked) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.corrupt_every_get = 1, .corrupt_probability = 0.25});
  size_t corrupted = 0;
  for (int i = 0; i < 400; ++i) {
    auto got = Get(0, 100);
    sim.RunUntilIdle();
    corrupted += WrongBytes(*got, 0);
  }
  EXPECT_GT(corrupted, 60u);
  EXPECT_LT(corrupted, 140u);
}

TEST_F(FakeNet, ASilentLinkMeetsTheDeadlineAndEndsTheSession) {
  ASSERT_EQ(Open(), OkStatus());
  SetLink({.silent = true});
  const Nanos start = sim.Now();
  auto got = Get(0, 10, 5s);
  auto patient = Get(0, 10, 50s);
  sim.RunUntilIdle();
  EXPECT_EQ(got->status->code(), Code::kDeadlineExceeded);
  EXPECT_EQ(got->at - start, 5s);
  EXPECT_EQ(patient->status->code(), Code::kUnavailable);
  EXPECT_TRUE(reader_peer.closed.has_value());
  EXPECT_FALSE(source_peer.closed.has_value()) << "nothing reaches the peer over a silent link";
}

TEST_F(FakeNet, ASilentLinkMeetsTheDeadlineOfConnect) {
  SetLink({.silent = true});
  EXPECT_EQ(Open(2s).code(), Code::kDeadlineExceeded);
}

TEST_F(FakeNet, RefusesHellosWhenAsked) {
  SetLink({.refuse_hello = true});
  const Status status = Open();
  EXPECT_EQ(status.code(), Code::kUnauthenticated);
  EXPECT_EQ(status.reason(), Reason::kTicketRejected);
}

TEST_F(FakeNet, BreakEndsTheSessionsOfTwoNodes) {
  ASSERT_EQ(Open(), OkStatus());
  network.Break("source", "reader");
  sim.RunUntilIdle();
  EXPECT_EQ(reader_peer.closed->code(), Code::kUnavailable);
  EXPECT_EQ(source_peer.closed->code(), Code::kUnavailable);
}

TEST_F(FakeNet, ANodeMayComeBackUnderItsAddress) {
  ASSERT_EQ(Open(), OkStatus());
  source.reset();
  sim.RunUntilIdle();
  EXPECT_TRUE(reader_peer.closed.has_value());
  source = network.MakeTransport("source");
  ASSERT_EQ(source->Start(&source_peer, Incarnation(9)), OkStatus());
  const Status status = Open();
  EXPECT_EQ(status.reason(), Reason::kStaleIncarnation);
}

TEST(FakeNetDeterminism, EqualSeedsGiveEqualRuns) {
  const auto run = [](uint64_t seed) {
    class Run : public FakeNet {
     public:
      explicit Run(uint64_t the_seed) : FakeNet(the_seed) {}
      void TestBody() override {
        EXPECT_EQ(Open(), OkStatus());
        SetLink({.latency = 1ms,
                 .get_jitter_max = 50ms,
                 .corrupt_every_get = 1,
                 .corrupt_probability = 0.5});
        std::vector<std::shared_ptr<Got>> gets;
        for (int i = 0; i < 30; ++i) gets.push_back(Get(0, 1000));
        sim.RunUntilIdle();
        for (const auto& got : gets) {
          trace.push_back(got->at.count());
          for (std::byte byte : got->bytes) trace.push_back(std::to_integer<int64_t>(byte));
        }
      }
      std::vector<int64_t> trace;
    };
    Run one(seed);
    one.TestBody();
    return one.trace;
  };
  EXPECT_EQ(run(7), run(7));
  EXPECT_NE(run(7), run(8));
}

}  // namespace
}  // namespace weightwire::transport
