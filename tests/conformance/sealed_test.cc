// A relay that changes frames, with every checksum made good again: under crc it has its way, which
// is what shows that it does what it says; under mac each change ends the session, is counted, and
// touches nothing that is told to be there. What it leaves alone afterwards works.
#include <optional>

#include "tests/conformance/counting_sink.h"
#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"
#include "tests/conformance/tamper_relay.h"

namespace weightwire::conformance {
namespace {

constexpr uint64_t kBytes = 300'000;

class Tampered : public Conformance {
 protected:
  Tampered() : sink(rig) {}

  bool sealed() const { return rig.kind().integrity == transport::Integrity::kMac; }
  /// Both sides, with a relay between them that has `tamper` do its work until `done`.
  void Stand(TamperRelay::Way way, TamperRelay::Tamper tamper) {
    callee = rig.MakeSide({.metrics = &sink});
    caller = rig.MakeSide({.metrics = &sink});
    relay = std::make_unique<TamperRelay>(
        callee->transport->address(), sealed(), way,
        [this, tamper](const WireFrame& wire, const TamperRelay::Emit& emit) {
          done ? emit(wire) : tamper(wire, emit);
        });
    region = PatternRegion(kBytes);
    key = callee->transport->Export({{region, 0, kBytes}});
  }
  std::shared_ptr<Endpoint> Dial() {
    auto call = rig.Connect(*caller, relay->address(), rig.HelloFor(*caller, callee->self));
    EXPECT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
    return call->endpoint;
  }
  std::shared_ptr<Call> Read(const std::shared_ptr<Endpoint>& endpoint, uint64_t offset,
                             std::vector<std::byte>& into) {
    return rig.Get(endpoint, key, offset, {into});
  }
  /// One more session, which the relay leaves alone.
  void ExpectAllIsWellAfterwards() {
    ASSERT_TRUE(done);
    std::vector<std::byte> bytes(kBytes);
    auto call = Read(Dial(), 0, bytes);
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
    EXPECT_EQ(FirstDifference(bytes, 0), -1);
  }
  void ExpectRefused(const std::shared_ptr<Call>& call) {
    EXPECT_EQ(call->status.code(), Code::kUnavailable);
    EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
    EXPECT_NE(call->status.message().find("its MAC does not fit"), std::string::npos)
        << call->status.ToString();
    EXPECT_NE(call->status.message().find(std::to_string(callee->self.value)), std::string::npos);
    ExpectCounted();
  }
  void ExpectCounted() {
    EXPECT_TRUE(rig.Wait([&] { return sink.counts["auth_failures_total mac"] == 1; }));
    EXPECT_TRUE(rig.Wait([&] { return sink.counts["transport_closes_total mac"] == 1; }));
  }
  /// Sends "one", "two", … to the caller.
  void Notify(const std::vector<std::string>& words) {
    ASSERT_TRUE(rig.Wait([&] { return callee->recorder.accepted.size() == 1; }));
    for (const std::string& word : words) {
      ASSERT_EQ(callee->recorder.accepted[0]->Notify(std::as_bytes(std::span(word))), OkStatus());
    }
  }
  bool Heard(const std::vector<std::string>& words) {
    return rig.Wait([&] { return caller->recorder.notifies == words; });
  }
  /// What the caller hears of what was sent: with MACs up to the attack, which ends the session.
  void ExpectHeard(const std::vector<std::string>& with_macs,
                   const std::vector<std::string>& without) {
    EXPECT_TRUE(!sealed() || Closed());
    EXPECT_TRUE(Heard(sealed() ? with_macs : without));
    if (sealed()) ExpectCounted();
    ExpectAllIsWellAfterwards();
  }
  bool Closed() {
    return rig.Wait([&] { return caller->recorder.closed.size() == 1; });
  }

  CountingSink sink;
  // Of the relay's threads, which end with it.
  std::atomic<bool> done{false};
  std::optional<WireFrame> held;
  std::unique_ptr<TamperRelay> relay;  // ends after the sides
  std::unique_ptr<Side> callee;
  std::unique_ptr<Side> caller;
  std::shared_ptr<memory::MemoryRegion> region;
  RegionKey key;
};

TEST_P(Tampered, AByteOfAPayload) {
  Stand(TamperRelay::Way::kToCaller, [this](WireFrame wire, const TamperRelay::Emit& emit) {
    if (wire.payload.size() > kBytes / 2) {
      wire.payload[kBytes / 2] ^= std::byte{4};
      done = true;
    }
    emit(wire);
  });
  std::vector<std::byte> bytes(kBytes);
  auto call = Read(Dial(), 0, bytes);
  ASSERT_TRUE(rig.WaitFor(call));
  if (sealed()) {
    ExpectRefused(call);
  } else {
    EXPECT_EQ(call->status, OkStatus());
    EXPECT_EQ(FirstDifference(bytes, 0), static_cast<int64_t>(kBytes / 2));
  }
  ExpectAllIsWellAfterwards();
}

/// The callee must not even look at what a request that was changed asks for.
TEST_P(Tampered, ARequestsRange) {
  Stand(TamperRelay::Way::kToCallee, [this](WireFrame wire, const TamperRelay::Emit& emit) {
    Frame other = wire.frame;
    other.offset += 64;
    done = true;
    emit(Rewritten(wire, other));
  });
  std::vector<std::byte> bytes(kBytes / 2);
  auto call = Read(Dial(), 0, bytes);
  ASSERT_TRUE(rig.WaitFor(call));
  if (sealed()) {
    EXPECT_EQ(call->status.reason(), Reason::kTransportFailed);
    ExpectCounted();
    EXPECT_EQ(bytes, std::vector<std::byte>(kBytes / 2)) << "nothing was sent";
  } else {
    EXPECT_EQ(call->status, OkStatus());
    EXPECT_EQ(FirstDifference(bytes, 64), -1) << "what another range holds";
  }
  ExpectAllIsWellAfterwards();
}

TEST_P(Tampered, TwoRepliesThatChangePlaces) {
  Stand(TamperRelay::Way::kToCaller, [this](WireFrame wire, const TamperRelay::Emit& emit) {
    if (!held) {
      held = wire;
      return;
    }
    // Each as the answer to the other's request, tags and all.
    std::swap(wire.payload, held->payload);
    done = true;
    emit(*held);
    emit(wire);
  });
  auto endpoint = Dial();
  std::vector<std::byte> low(kBytes / 2), high(kBytes / 2);
  auto first = Read(endpoint, 0, low);
  auto second = Read(endpoint, kBytes / 2, high);
  ASSERT_TRUE(rig.WaitFor(first) && rig.WaitFor(second));
  if (sealed()) {
    ExpectRefused(first);
    EXPECT_EQ(second->status.reason(), Reason::kTransportFailed);
  } else {
    EXPECT_EQ(first->status, OkStatus());
    EXPECT_EQ(FirstDifference(low, kBytes / 2), -1) << "the other one's bytes";
  }
  ExpectAllIsWellAfterwards();
}

TEST_P(Tampered, TwoFramesThatChangePlaces) {
  Stand(TamperRelay::Way::kToCaller, [this](const WireFrame& wire, const auto& emit) {
    if (!held) {
      held = wire;
      return;
    }
    done = true;
    emit(wire);
    emit(*held);
  });
  auto endpoint = Dial();
  Notify({"one", "two"});
  ExpectHeard({}, {"two", "one"});
}

TEST_P(Tampered, AFrameThatComesTwice) {
  Stand(TamperRelay::Way::kToCaller, [this](const WireFrame& wire, const auto& emit) {
    done = true;
    emit(wire);
    emit(wire);
  });
  auto endpoint = Dial();
  Notify({"one"});
  ExpectHeard({"one"}, {"one", "one"});
}

TEST_P(Tampered, AFrameThatIsLeftOut) {
  Stand(TamperRelay::Way::kToCaller, [this](const WireFrame&, const auto&) { done = true; });
  auto endpoint = Dial();
  Notify({"one", "two"});
  ExpectHeard({}, {"two"});
}

INSTANTIATE_TEST_SUITE_P(Transports, Tampered,
                         ::testing::Values(Kind{"crc", "tcp", 1},
                                           Kind{"mac", "tcp", 1, {}, transport::Integrity::kMac}),
                         KindName);

}  // namespace
}  // namespace weightwire::conformance
