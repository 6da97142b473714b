// The six points of server/transport/transport.h.
#include <algorithm>
#include <atomic>
#include <future>

#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

constexpr std::byte kUntouched{0xee};
constexpr uint64_t kBytes = 4 << 20;

class Contract : public Conformance {
 protected:
  Contract()
      : source(rig.MakeSide()),
        reader(rig.MakeSide()),
        region(PatternRegion(kBytes)),
        key(source->transport->Export({{region, 0, kBytes}})),
        endpoint(rig.Open(*reader, *source)) {}

  std::vector<std::shared_ptr<Call>> PostGets(size_t count) {
    buffers.assign(count, std::vector<std::byte>(kBytes));
    std::vector<std::shared_ptr<Call>> calls;
    for (auto& buffer : buffers) calls.push_back(rig.Get(endpoint, key, 0, {buffer}));
    return calls;
  }

  std::unique_ptr<Side> source;
  std::unique_ptr<Side> reader;
  std::shared_ptr<memory::MemoryRegion> region;
  RegionKey key;
  std::shared_ptr<Endpoint> endpoint;
  std::vector<std::vector<std::byte>> buffers;
};

TEST_P(Contract, CloseEndsEveryGetOnceThenReportsTheEnd) {
  auto calls = PostGets(100);
  endpoint->Close();
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  rig.Update([&] {
    for (const auto& call : calls) {
      EXPECT_EQ(call->completions, 1) << "OnClosed must come after all completions";
      EXPECT_TRUE(call->status.ok() || call->status.code() == Code::kCancelled)
          << call->status.ToString();
    }
    EXPECT_EQ(reader->recorder.closed.at(endpoint->id()).code(), Code::kCancelled);
  });
  // The peer notices; its end is no wish of its own.
  ASSERT_TRUE(rig.Wait([&] { return source->recorder.closed.size() == 1; }));
  EXPECT_EQ(source->recorder.closed.begin()->second.code(), Code::kUnavailable);
  auto late = rig.Get(endpoint, key, 0, {buffers.front()});
  ASSERT_TRUE(rig.WaitFor(late));
  EXPECT_EQ(late->status.code(), Code::kCancelled);
  EXPECT_EQ(reader->recorder.closed_calls.at(endpoint->id()), 1);
}

TEST_P(Contract, BuffersAreUntouchedOnceTheirCompletionRan) {
  struct Watched {
    std::vector<std::byte> buffer = std::vector<std::byte>(kBytes);
    std::atomic<bool> done{false};
  };
  std::vector<Watched> watched(40);
  std::atomic<int> completions{0};
  for (Watched& one : watched) {
    endpoint->Get(key, 0, {one.buffer}, kLong, nullptr, [&](Status) {
      std::fill(one.buffer.begin(), one.buffer.end(), kUntouched);
      one.done = true;
      rig.Update([&] { ++completions; });
    });
  }
  ASSERT_TRUE(rig.Wait([&] { return completions >= 2; }));
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  reader->transport.reset();
  EXPECT_EQ(completions, 40);
  for (const Watched& one : watched) {
    EXPECT_TRUE(std::all_of(one.buffer.begin(), one.buffer.end(),
                            [](std::byte byte) { return byte == kUntouched; }));
  }
}

TEST_P(Contract, CallbacksRunOnTheTransportsThreadsAndMayCallBack) {
  std::vector<std::byte> first(1000);
  std::vector<std::byte> second(1000);
  std::shared_ptr<Call> nested;
  std::shared_ptr<Call> revoked;
  std::atomic<bool> done{false};
  endpoint->Get(key, 0, {first}, kLong, nullptr, [&](Status status) {
    EXPECT_EQ(status, OkStatus());
    // Any lock held by the transport here would make these calls hang.
    nested = rig.Get(endpoint, key, 500, {second});
    static_cast<void>(endpoint->Notify(std::as_bytes(std::span("hi", 2))));
    const RegionKey own = reader->transport->Export({{region, 0, 10}});
    revoked = rig.Revoke(*reader, own);
    rig.Update([&] { done = true; });
  });
  ASSERT_TRUE(rig.Wait([&] {
    return done && nested->completions == 1 && revoked->completions == 1 &&
           !source->recorder.notifies.empty();
  }));
  EXPECT_EQ(nested->status, OkStatus());
  EXPECT_EQ(FirstDifference(second, 500), -1);
  EXPECT_FALSE(nested->inside_post);
  EXPECT_FALSE(revoked->inside_post);
  if (!rig.is_fake()) {
    EXPECT_NE(nested->thread, std::this_thread::get_id());
    EXPECT_FALSE(source->recorder.threads.contains(std::this_thread::get_id()));
  }
}

TEST_P(Contract, CompletionMayCloseTheEndpoint) {
  std::vector<std::byte> first(1000);
  auto rest = PostGets(30);
  std::atomic<bool> closed{false};
  endpoint->Get(key, 0, {first}, kLong, nullptr, [&](Status) {
    endpoint->Close();
    closed = true;
  });
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  EXPECT_TRUE(closed);
  for (const auto& call : rest) EXPECT_EQ(call->completions, 1);
}

TEST_P(Contract, ViableSaysYesHere) { EXPECT_EQ(reader->transport->Viable(), OkStatus()); }

TEST_P(Contract, RevokeWaitsForGetsUnderWayAndRefusesLaterOnes) {
  auto calls = PostGets(60);
  ASSERT_TRUE(rig.WaitFor(calls.front()));  // others are under way now
  auto revoked = rig.Revoke(*source, key);
  auto again = rig.Revoke(*source, key);
  ASSERT_TRUE(rig.WaitFor(revoked));
  ASSERT_TRUE(rig.WaitFor(again));
  // From here on the memory is ours: whatever still arrives must be the old bytes.
  std::fill_n(region->data(), kBytes, kUntouched);
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_TRUE(rig.WaitFor(calls[i]));
    if (calls[i]->status.ok()) {
      ASSERT_EQ(FirstDifference(buffers[i], 0), -1) << "bytes from after the revocation";
    } else {
      ASSERT_EQ(calls[i]->status.code(), Code::kNotFound);
    }
  }
  EXPECT_EQ(revoked->completions, 1);
  EXPECT_EQ(again->completions, 1);
}

TEST_P(Contract, ExportKeepsItsRegionUntilRevoked) {
  std::weak_ptr<memory::MemoryRegion> watch = region;
  region.reset();
  std::vector<std::byte> buffer(kBytes);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(buffer, 0), -1);
  EXPECT_FALSE(watch.expired());
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, key)));
  source->transport.reset();
  EXPECT_TRUE(watch.expired());
}

TEST_P(Contract, EndingTheTransportOfTheReaderCompletesItsGets) {
  auto calls = PostGets(100);
  reader->transport.reset();
  for (const auto& call : calls) {
    EXPECT_EQ(call->completions, 1);
    EXPECT_TRUE(call->status.ok() || call->status.code() == Code::kCancelled);
  }
  EXPECT_EQ(reader->recorder.closed_calls.at(endpoint->id()), 1);
  auto late = rig.Get(endpoint, key, 0, {buffers.front()});
  ASSERT_TRUE(rig.WaitFor(late));
  EXPECT_FALSE(late->status.ok());
}

TEST_P(Contract, EndingTheTransportOfTheSourceFailsTheGets) {
  auto calls = PostGets(100);
  source->transport.reset();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_EQ(calls[i]->completions, 1);
    if (calls[i]->status.ok()) {
      EXPECT_EQ(FirstDifference(buffers[i], 0), -1);
    } else {
      EXPECT_EQ(calls[i]->status.code(), Code::kUnavailable);
      EXPECT_EQ(calls[i]->status.reason(), Reason::kTransportFailed);
    }
  }
}

TEST_P(Contract, EndingATransportAnswersItsConnects) {
  auto call =
      rig.Connect(*reader, source->transport->address(), rig.HelloFor(*reader, source->self));
  reader->transport.reset();
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->completions, 1);
}

/// Needs callbacks on a thread that can be held up.
class ContractOnThreads : public Contract {
 protected:
  /// Returns while the transport's thread is held up inside the completion of a Get, and another
  /// one is under way: posted on that thread, both are so before either completes.
  void HoldUp(Endpoint::GetDone other) {
    endpoint->Get(key, 0, {bytes[0]}, kLong, nullptr, [this, other](Status) {
      endpoint->Get(key, 1, {bytes[1]}, kLong, nullptr, [this](Status) {
        held.set_value();
        go.get_future().wait();
      });
      endpoint->Get(key, 2, {bytes[2]}, kLong, nullptr, other);
    });
    held.get_future().wait();
  }
  /// A completion that must come before the end is reported.
  Endpoint::GetDone Watched() {
    return [this](Status) {
      rig.Update([&] {
        reported_before = reader->recorder.closed.contains(endpoint->id());
        ++completions;
      });
    };
  }
  /// The peer ends while the thread is held up.
  void ExpectCompletionBeforeTheEnd() {
    source->transport.reset();
    go.set_value();
    ASSERT_TRUE(rig.Wait(
        [&] { return completions == 1 && reader->recorder.closed.contains(endpoint->id()); }));
    EXPECT_FALSE(reported_before);
  }

  std::promise<void> held, go;
  std::vector<std::vector<std::byte>> bytes{4, std::vector<std::byte>(1)};
  bool reported_before = false;
  int completions = 0;
};

TEST_P(ContractOnThreads, AGetThatEndsWithItsPeerCompletesBeforeTheEndIsReported) {
  HoldUp(Watched());
  ExpectCompletionBeforeTheEnd();
}

/// The end is there to be noticed as soon as the thread looks at the Get that is under way, and the
/// one that is posted here still waits for its turn.
TEST_P(ContractOnThreads, AGetPostedBeforeItsPeersEndCompletesBeforeTheEndIsReported) {
  HoldUp([](Status) {});
  endpoint->Get(key, 3, {bytes[3]}, kLong, nullptr, Watched());
  ExpectCompletionBeforeTheEnd();
}

INSTANTIATE_TEST_SUITE_P(Transports, ContractOnThreads, ::testing::ValuesIn(RealKinds()), KindName);
INSTANTIATE_TEST_SUITE_P(Transports, Contract, ::testing::ValuesIn(AllKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
