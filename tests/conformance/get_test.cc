#include <atomic>
#include <cstring>

#include "tests/conformance/pattern.h"
#include "tests/conformance/rig.h"

namespace weightwire::conformance {
namespace {

constexpr std::byte kUntouched{0xee};

class Gets : public Conformance {
 protected:
  Gets() : source(rig.MakeSide()), reader(rig.MakeSide()), endpoint(rig.Open(*reader, *source)) {}

  std::unique_ptr<Side> source;
  std::unique_ptr<Side> reader;
  std::shared_ptr<Endpoint> endpoint;
};

TEST_P(Gets, ReadsOddRangesOfOddPieces) {
  std::mt19937_64 random(Seed());
  constexpr uint64_t kBytes = (3 << 20) + 4099;
  auto region = PatternRegion(kBytes);
  for (size_t pieces : {1, 2, 3, 70, 5000}) {
    const RegionKey key = source->transport->Export(CutPieces(region, pieces, random));
    for (size_t bytes : {size_t{1}, size_t{2}, size_t{63}, size_t{4097}, size_t{1} << 20,
                         static_cast<size_t>(kBytes)}) {
      for (size_t spans : {1, 3, 2000}) {
        const uint64_t offset = random() % (kBytes - bytes + 1);
        std::vector<std::byte> buffer(bytes + 2, kUntouched);
        auto call = rig.Get(endpoint, key, offset,
                            CutSpans(std::span(buffer).subspan(1, bytes), spans, random));
        ASSERT_TRUE(rig.WaitFor(call));
        ASSERT_EQ(call->status, OkStatus());
        ASSERT_EQ(FirstDifference(std::span(buffer).subspan(1, bytes), offset), -1)
            << pieces << " pieces, " << bytes << " bytes, " << spans << " spans";
        ASSERT_EQ(buffer.front(), kUntouched);
        ASSERT_EQ(buffer.back(), kUntouched);
      }
    }
  }
}

TEST_P(Gets, ReadsPiecesOfSeveralRegionsInOrder) {
  auto first = PatternRegion(10007, 0);
  auto second = PatternRegion(4099, 10007 - 100);
  const RegionKey key =
      source->transport->Export({{first, 0, 10007}, {second, 100, 3999}, {first, 1, 1}});
  std::vector<std::byte> buffer(10007 + 3999 + 1);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  ASSERT_EQ(call->status, OkStatus());
  EXPECT_EQ(FirstDifference(std::span(buffer).first(10007 + 3999), 0), -1);
  EXPECT_EQ(buffer.back(), PatternAt(1));
}

TEST_P(Gets, ManyAtOnceAllArriveWhole) {
  std::mt19937_64 random(Seed());
  constexpr uint64_t kBytes = 8 << 20;
  auto region = PatternRegion(kBytes);
  const RegionKey key = source->transport->Export(CutPieces(region, 301, random));
  struct One {
    uint64_t offset;
    std::vector<std::byte> buffer;
    std::shared_ptr<Call> call;
  };
  std::vector<One> gets(500);  // far above what may be in flight
  for (One& get : gets) {
    get.buffer.resize(1 + random() % 100'000);
    get.offset = random() % (kBytes - get.buffer.size());
    get.call = rig.Get(endpoint, key, get.offset, CutSpans(get.buffer, 1 + random() % 9, random));
  }
  for (One& get : gets) {
    ASSERT_TRUE(rig.WaitFor(get.call));
    ASSERT_EQ(get.call->status, OkStatus());
    ASSERT_EQ(get.call->completions, 1);
    ASSERT_EQ(FirstDifference(get.buffer, get.offset), -1);
  }
}

TEST_P(Gets, BothSidesReadFromEachOtherAtOnce) {
  constexpr uint64_t kBytes = 4 << 20;
  auto ours = PatternRegion(kBytes, 1);
  auto theirs = PatternRegion(kBytes, 2);
  const RegionKey our_key = reader->transport->Export({{ours, 0, kBytes}});
  const RegionKey their_key = source->transport->Export({{theirs, 0, kBytes}});
  ASSERT_TRUE(rig.Wait([&] { return source->recorder.accepted.size() == 1; }));
  auto back = source->recorder.accepted.front();
  constexpr size_t kCount = 20;
  std::vector<std::vector<std::byte>> buffers(2 * kCount, std::vector<std::byte>(kBytes));
  std::vector<std::shared_ptr<Call>> calls;
  for (size_t i = 0; i < 2 * kCount; ++i) {
    calls.push_back(i % 2 == 0 ? rig.Get(endpoint, their_key, 0, {buffers[i]})
                               : rig.Get(back, our_key, 0, {buffers[i]}));
  }
  for (size_t i = 0; i < 2 * kCount; ++i) {
    ASSERT_TRUE(rig.WaitFor(calls[i]));
    ASSERT_EQ(calls[i]->status, OkStatus());
    ASSERT_EQ(FirstDifference(buffers[i], i % 2 == 0 ? 2 : 1), -1);
  }
}

TEST_P(Gets, RefusesKeysThatAreUnknownRevokedOrOfAnotherGeneration) {
  auto region = PatternRegion(5000);
  const RegionKey key = source->transport->Export({{region, 0, 5000}});
  const RegionKey revoked = source->transport->Export({{region, 0, 5000}});
  ASSERT_TRUE(rig.WaitFor(rig.Revoke(*source, revoked)));
  for (RegionKey wrong : {RegionKey{key.id, key.generation + 1}, RegionKey{key.id + 99, 1}, revoked,
                          RegionKey{0, 0}}) {
    std::vector<std::byte> buffer(100, kUntouched);
    auto call = rig.Get(endpoint, wrong, 0, {buffer});
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status.code(), Code::kNotFound);
    EXPECT_EQ(call->status.reason(), Reason::kStaleIncarnation);
    EXPECT_EQ(buffer, std::vector<std::byte>(100, kUntouched));
  }
  std::vector<std::byte> buffer(100);
  auto call = rig.Get(endpoint, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus()) << "a refusal must not end the session";
}

TEST_P(Gets, RefusesRangesOutsideTheExport) {
  auto region = PatternRegion(5000);
  const RegionKey key = source->transport->Export({{region, 100, 4000}, {region, 0, 0}});
  struct Range {
    uint64_t offset;
    size_t bytes;
  };
  for (Range range : {Range{0, 4001}, Range{4000, 1}, Range{3999, 2}, Range{UINT64_MAX, 1},
                      Range{UINT64_MAX - 1, 3}}) {
    std::vector<std::byte> buffer(range.bytes, kUntouched);
    auto call = rig.Get(endpoint, key, range.offset, {buffer});
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status.code(), Code::kOutOfRange) << range.offset;
    EXPECT_EQ(call->status.reason(), Reason::kInvalidRequest);
    EXPECT_EQ(buffer, std::vector<std::byte>(range.bytes, kUntouched));
  }
}

TEST_P(Gets, RefusesNothingAndMoreThanAChunk) {
  auto small = rig.MakeSide({.chunk_bytes_max = 1000});
  auto limited = rig.Open(*small, *source);
  auto region = PatternRegion(5000);
  const RegionKey key = source->transport->Export({{region, 0, 5000}});
  std::vector<std::byte> buffer(1001);
  for (auto into : {std::vector<MutableSpan>{}, std::vector<MutableSpan>{MutableSpan{}},
                    std::vector<MutableSpan>{buffer}}) {
    auto call = rig.Get(limited, key, 0, into);
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status.code(), Code::kInvalidArgument);
  }
  auto call = rig.Get(limited, key, 0, {std::span(buffer).first(1000)});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status, OkStatus());
}

TEST_P(Gets, ServesNoMoreThanItsOwnChunkLimit) {
  auto strict = rig.MakeSide({.chunk_bytes_max = 1000});
  auto limited = rig.Open(*reader, *strict);
  auto region = PatternRegion(5000);
  const RegionKey key = strict->transport->Export({{region, 0, 5000}});
  std::vector<std::byte> buffer(1001, kUntouched);
  auto call = rig.Get(limited, key, 0, {buffer});
  ASSERT_TRUE(rig.WaitFor(call));
  EXPECT_EQ(call->status.code(), Code::kInvalidArgument);
  EXPECT_EQ(call->status.reason(), Reason::kMessageTooLarge);
  EXPECT_EQ(buffer, std::vector<std::byte>(1001, kUntouched));
}

TEST_P(Gets, HandThePiecesInOrderToWhoTakesThem) {
  std::mt19937_64 random(Seed());
  constexpr uint64_t kBytes = (5 << 20) + 77;
  auto region = PatternRegion(kBytes);
  const RegionKey key = source->transport->Export(CutPieces(region, 70, random));
  EXPECT_EQ(reader->transport->capabilities().gets_through, endpoint->transport_name() == "tcp");
  for (size_t spans : {1, 3, 2000}) {
    std::vector<std::byte> buffer(kBytes, kUntouched);
    uint64_t taken = 0;
    int calls = 0, completions = 0, late = 0, wrong = 0;
    Status outcome;
    endpoint->GetThrough(
        key, 0, CutSpans(buffer, spans, random), kLong, nullptr,
        [&](std::span<const std::byte> piece) {
          ++calls;
          late += completions;
          if (piece.empty() || piece.size() > kBytes - taken) {
            ++wrong;
            return;
          }
          std::ranges::copy(piece, buffer.begin() + static_cast<ptrdiff_t>(taken));
          taken += piece.size();
        },
        [&](Status status) {
          rig.Update([&] {
            outcome = status;
            ++completions;
          });
        });
    ASSERT_TRUE(rig.Wait([&] { return completions == 1; }));
    ASSERT_EQ(outcome, OkStatus());
    EXPECT_EQ(FirstDifference(buffer, 0), -1);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(late, 0);
    // tcp hands them on, in pieces that a second-level cache holds; the others write themselves.
    if (endpoint->transport_name() == "tcp") {
      EXPECT_EQ(taken, kBytes);
      EXPECT_GT(calls, 10);
    } else {
      EXPECT_EQ(calls, 0);
    }
  }
}

// What `leaving` writes is what arrives, of each Get and whatever else is under way.
TEST_P(Gets, AreToldBeforeTheirBytesLeave) {
  const bool tells = source->transport->capabilities().tells_leaving;
  const Kind& kind = GetParam();
  EXPECT_EQ(tells, kind.backend == "tcp" || (kind.backend == "fake" && !kind.gpu));
  if (!tells) return;
  constexpr uint64_t kBytes = 3 << 20;
  const auto region = *memory::MemoryRegion::Allocate("told", kBytes);
  std::memset(region->data(), 0, kBytes);
  std::atomic<uint64_t> told = 0;
  const RegionKey key =
      source->transport->ExportTold({{region, 0, kBytes}}, [&](uint64_t offset, uint64_t bytes) {
        for (uint64_t i = offset; i < offset + bytes; ++i) region->data()[i] = PatternAt(i);
        told += bytes;
      });
  constexpr uint64_t kOne = 100'003;
  std::vector<std::byte> buffer(kBytes, kUntouched);
  std::vector<std::shared_ptr<Call>> calls;
  for (uint64_t offset = 0; offset < kBytes; offset += kOne) {
    const std::span one = std::span(buffer).subspan(offset, std::min(kOne, kBytes - offset));
    calls.push_back(rig.Get(endpoint, key, offset, {one}));
  }
  for (const auto& call : calls) {
    ASSERT_TRUE(rig.WaitFor(call));
    EXPECT_EQ(call->status, OkStatus());
  }
  EXPECT_EQ(FirstDifference(buffer, 0), -1);
  EXPECT_EQ(told, kBytes);
  // Of what is refused nothing leaves.
  auto refused = rig.Get(endpoint, key, kBytes - 1, {std::span(buffer).first(2)});
  ASSERT_TRUE(rig.WaitFor(refused));
  EXPECT_EQ(refused->status.code(), Code::kOutOfRange);
  EXPECT_EQ(told, kBytes);
}

TEST_P(Gets, HoldIsKeptUntilTheCompletionAndReleasedAfterIt) {
  auto region = PatternRegion(5000);
  const RegionKey key = source->transport->Export({{region, 0, 5000}});
  auto buffer = std::make_shared<std::vector<std::byte>>(5000);
  std::weak_ptr<std::vector<std::byte>> watch = buffer;
  std::atomic<bool> alive_in_completion{false};
  std::atomic<int> completions{0};
  MutableSpan span(*buffer);
  endpoint->Get(key, 0, {span}, kLong, std::shared_ptr<void>(std::move(buffer)), [&](Status) {
    alive_in_completion = !watch.expired();
    rig.Update([&] { ++completions; });
  });
  ASSERT_TRUE(rig.Wait([&] { return completions == 1; }));
  EXPECT_TRUE(alive_in_completion);
  // The release follows the completion; a later completion of the same session orders it.
  std::vector<std::byte> other(1);
  endpoint->Close();
  ASSERT_TRUE(rig.Wait([&] { return reader->recorder.closed.contains(endpoint->id()); }));
  EXPECT_TRUE(watch.expired());
}

INSTANTIATE_TEST_SUITE_P(Transports, Gets, ::testing::ValuesIn(AllKinds()), KindName);

}  // namespace
}  // namespace weightwire::conformance
