#define XXH_INLINE_ALL
#include "kernels/delta.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/device_delta.h"
#include "kernels/simd.h"
#include "tests/unit/kernels/oracle.h"

namespace weightwire::kernels {
namespace {

using internal::SimdKernels;
using internal::SimdVariants;
using Bytes = std::vector<uint8_t>;

constexpr DeltaOrder kOrders[] = {DeltaOrder::kBits8,  DeltaOrder::kBits16, DeltaOrder::kBits32,
                                  DeltaOrder::kBits64, DeltaOrder::kFloat8, DeltaOrder::kFloat16,
                                  DeltaOrder::kFloat32};

/// Streams with exactly the room that the header promises, so that AddressSanitizer sees one more.
struct Streams {
  Streams(size_t elements, size_t width, size_t changes_max)
      : gaps(DeltaGapBytesMax(elements, changes_max)),
        steps(changes_max + kDeltaSlack),
        escapes((changes_max + kDeltaSlack) * width),
        delta{gaps.data(), steps.data(), escapes.data(), 0, 0, 0} {}
  Bytes gaps, steps, escapes;
  DeltaStreams delta;
};

uint64_t Load(const uint8_t* at, size_t width) {
  uint64_t value = 0;
  std::memcpy(&value, at, width);
  return value;
}

/// The place of every pattern of 16 bits among the floats of `element`, by their values: what
/// kernels/delta.h says of zeros and NaNs, in words.
std::vector<uint32_t> PlacesByValue(Element element) {
  std::vector<uint32_t> patterns(1u << 16);
  std::iota(patterns.begin(), patterns.end(), 0u);
  std::sort(patterns.begin(), patterns.end(), [element](uint32_t a, uint32_t b) {
    const bool a_negative = (a >> 15) != 0, b_negative = (b >> 15) != 0;
    if (a_negative != b_negative) return a_negative;
    if (oracle::IsSpecial(element, a) || oracle::IsSpecial(element, b)) {
      // Infinity is the special one with the smallest payload; payloads grow away from zero.
      const uint32_t x = a & 0x7fff, y = b & 0x7fff;
      return a_negative ? x > y : x < y;
    }
    return oracle::Decode(element, a) < oracle::Decode(element, b);
  });
  std::vector<uint32_t> places(patterns.size());
  for (uint32_t place = 0; place < patterns.size(); ++place) places[patterns[place]] = place;
  return places;
}

TEST(DeltaScan, StepsCountFloatsBetweenTheOldAndTheNewValue) {
  for (const Element element : {Element::kBF16, Element::kF16}) {
    const std::vector<uint32_t> places = PlacesByValue(element);
    auto random = SeededGenerator();
    for (int i = 0; i < 50'000; ++i) {
      const auto was = static_cast<uint16_t>(random());
      const auto is = static_cast<uint16_t>(i % 2 == 0 ? random() : was + random() % 31 - 15);
      if (was == is) continue;
      Streams streams(1, 2, 1);
      ASSERT_TRUE(DeltaScan(DeltaOrder::kFloat16, &was, &is, 1, 1, streams.delta));
      const int64_t apart = int64_t{places[is]} - int64_t{places[was]};
      const int64_t step = apart > 32767 ? apart - 65536 : apart < -32768 ? apart + 65536 : apart;
      const int64_t zigzag = step < 0 ? -2 * step - 1 : 2 * step;
      if (zigzag <= 15) {
        ASSERT_EQ(streams.steps[0], zigzag - 1) << was << " " << is;
        ASSERT_EQ(streams.delta.escape_count, 0u);
      } else {
        ASSERT_EQ(streams.steps[0], 15) << was << " " << is;
        ASSERT_EQ(streams.delta.escape_count, 1u);
        ASSERT_EQ(Load(streams.escapes.data(), 2), static_cast<uint64_t>(zigzag));
      }
    }
  }
}

TEST(DeltaScan, AStepOfF32IsOneNextafter) {
  auto random = SeededGenerator();
  for (int i = 0; i < 20'000; ++i) {
    float was = std::ldexp(static_cast<float>(random() % 1000) - 500.f,
                           static_cast<int>(random() % 60) - 30);
    if (i % 10 == 0) was = 0.f;
    const int steps = static_cast<int>(random() % 7) + 1;
    const bool up = random() % 2 == 0;
    float is = was;
    int seen = 0;  // -0 and +0 are equal to nextafter and a step apart here
    while (seen < steps) {
      const float next = std::nextafter(is, up ? INFINITY : -INFINITY);
      const bool over_zero = up ? is < 0 && next == 0 : is == 0 && !std::signbit(is);
      if (over_zero && !up) {
        is = -0.f;
      } else {
        is = next;
        if (is == 0) is = up ? -0.f : 0.f;
      }
      ++seen;
      if (up && is == 0 && std::signbit(is) && seen < steps) {
        is = 0.f;
        ++seen;
      }
    }
    Streams streams(1, 4, 1);
    ASSERT_TRUE(DeltaScan(DeltaOrder::kFloat32, &was, &is, 1, 1, streams.delta));
    ASSERT_EQ(streams.delta.changes, 1u);
    ASSERT_EQ(streams.steps[0], up ? 2 * steps - 1 : 2 * steps - 2) << was << " " << is;
  }
}

/// Both versions, of which a share differs.
struct Versions {
  Bytes old_version, new_version;
  std::vector<size_t> changed;
};
/// Instead of a share: so far apart that gaps are just below, at and just above what bytes hold.
constexpr unsigned kEdgesOfGaps = 2000;
Versions RandomVersions(std::mt19937_64& random, size_t elements, size_t width,
                        unsigned per_mille) {
  Versions made{Bytes(elements * width), {}, {}};
  for (auto& byte : made.old_version) byte = static_cast<uint8_t>(random());
  made.new_version = made.old_version;
  constexpr size_t kEdges[] = {253, 254, 255, 256, 508, 509, 510, 511};
  size_t edge = kEdges[random() % std::size(kEdges)];
  for (size_t i = 0; i < elements; ++i) {
    if (per_mille == kEdgesOfGaps ? i < edge : random() % 1000 >= per_mille) continue;
    edge = i + 1 + kEdges[random() % std::size(kEdges)];
    uint8_t* at = made.new_version.data() + i * width;
    if (random() % 4 == 0) {
      for (size_t b = 0; b < width; ++b) at[b] = static_cast<uint8_t>(random());
    } else {
      at[0] = static_cast<uint8_t>(at[0] + (random() % 2 == 0 ? 1 : 255));
    }
    if (std::memcmp(at, made.old_version.data() + i * width, width) != 0) made.changed.push_back(i);
  }
  return made;
}

/// The streams by their definition in kernels/delta.h: one element after the other.
struct Defined {
  Bytes gaps, steps, escapes;
};
Defined ByDefinition(DeltaOrder order, const Versions& versions, size_t width) {
  const unsigned bits = static_cast<unsigned>(8 * width);
  const uint64_t all = bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1;
  const uint64_t sign = uint64_t{1} << (bits - 1);
  const auto place = [&](const Bytes& from, size_t index) {
    const uint64_t value = Load(from.data() + index * width, width);
    if (order < DeltaOrder::kFloat8) return value;
    return (value & sign) != 0 ? all - value : value + sign;
  };
  Defined made;
  size_t unchanged = 0;
  for (size_t i = 0; i < versions.old_version.size() / width; ++i) {
    const uint64_t was = place(versions.old_version, i), is = place(versions.new_version, i);
    if (was == is) {
      ++unchanged;
      continue;
    }
    for (; unchanged >= 255; unchanged -= 255) made.gaps.push_back(255);
    made.gaps.push_back(static_cast<uint8_t>(unchanged));
    unchanged = 0;
    const uint64_t up = (is - was) & all, down = (was - is) & all;
    const uint64_t zigzag = (up < sign ? 2 * up : 2 * down - 1) & all;
    made.steps.push_back(static_cast<uint8_t>(zigzag <= 15 ? zigzag - 1 : 15));
    if (zigzag <= 15) continue;
    for (size_t b = 0; b < width; ++b)
      made.escapes.push_back(static_cast<uint8_t>(zigzag >> 8 * b));
  }
  return made;
}

Bytes First(const Bytes& bytes, size_t count) {
  return Bytes(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(count));
}

enum class CopyTo { kNowhere, kElsewhere, kBase };

/// `bytes` at `offset` of memory of just that size, so that AddressSanitizer sees one more.
struct At {
  At(const Bytes& bytes, size_t at) : memory(at), offset(at) {
    memory.insert(memory.end(), bytes.begin(), bytes.end());
  }
  uint8_t* data() { return memory.data() + offset; }
  Bytes bytes() const {
    return Bytes(memory.begin() + static_cast<ptrdiff_t>(offset), memory.end());
  }
  Bytes memory;
  size_t offset;
};

TEST(DeltaScan, EverySetOfLoopsMakesTheStreamsAndTheCopyAndTheWayBackRestoresThem) {
  auto random = SeededGenerator();
  std::vector<size_t> sizes;
  for (size_t elements = 0; elements < 150; ++elements) sizes.push_back(elements);
  // About the turns of the loops: 4,096 bytes of each width, with whole lines and without.
  for (size_t elements : {511u, 512u, 513u, 1024u, 1087u, 2048u, 2111u, 4095u, 4096u, 4097u, 9001u})
    sizes.push_back(elements);
  for (const DeltaOrder order : kOrders) {
    const auto width = static_cast<size_t>(DeltaElementBytes(order));
    for (const size_t elements : sizes) {
      for (const unsigned per_mille : {0u, 2u, 30u, 500u, 1000u, kEdgesOfGaps}) {
        const Versions versions = RandomVersions(random, elements, width, per_mille);
        const Defined wanted = ByDefinition(order, versions, width);
        const Bytes untouched(versions.new_version.size(), 0x77);
        const uint64_t new_sum =
            XXH3_64bits(versions.new_version.data(), versions.new_version.size());
        ASSERT_EQ(wanted.steps.size(), versions.changed.size());
        for (const SimdKernels* simd : SimdVariants()) {
          for (const CopyTo to : {CopyTo::kNowhere, CopyTo::kElsewhere, CopyTo::kBase}) {
            SCOPED_TRACE(std::string(simd->name) + " order " +
                         std::to_string(static_cast<int>(order)) + " of " +
                         std::to_string(elements) + ", " + std::to_string(per_mille) +
                         " per mille, copy " + std::to_string(static_cast<int>(to)));
            At base(versions.old_version, random() % 64), now(versions.new_version, random() % 64);
            At elsewhere(untouched, random() % 64);
            Streams streams(elements, width, elements);
            uint8_t* const copy = to == CopyTo::kBase        ? base.data()
                                  : to == CopyTo::kElsewhere ? elsewhere.data()
                                                             : nullptr;
            internal::SumState sum;
            simd->sum_begin(&sum);
            ASSERT_TRUE(simd->delta_scan(order, base.data(), now.data(), elements, elements,
                                         &streams.delta, copy, &sum));
            ASSERT_EQ(simd->sum_end(&sum), new_sum);
            ASSERT_EQ(First(streams.gaps, streams.delta.gap_bytes), wanted.gaps);
            ASSERT_EQ(First(streams.steps, streams.delta.changes), wanted.steps);
            ASSERT_EQ(First(streams.escapes, streams.delta.escape_count * width), wanted.escapes);
            ASSERT_EQ(now.bytes(), versions.new_version);
            ASSERT_EQ(base.bytes(),
                      to == CopyTo::kBase ? versions.new_version : versions.old_version);
            ASSERT_EQ(elsewhere.bytes(),
                      to == CopyTo::kElsewhere ? versions.new_version : untouched);
            At made(untouched, random() % 64), from(versions.old_version, random() % 64);
            simd->sum_begin(&sum);
            ASSERT_TRUE(
                simd->delta_apply(order, made.data(), from.data(), elements, &streams.delta, &sum));
            ASSERT_EQ(made.bytes(), versions.new_version);
            ASSERT_EQ(from.bytes(), versions.old_version);
            ASSERT_EQ(simd->sum_end(&sum), new_sum);
            At target(versions.old_version, random() % 64);
            ASSERT_TRUE(DeltaApply(order, target.data(), elements, streams.delta));
            ASSERT_EQ(target.bytes(), versions.new_version);
          }
        }
      }
    }
  }
}

TEST(DeltaScan, GivesUpWhereMoreDiffersWithAWholeCopyAndItsSumAllTheSame) {
  auto random = SeededGenerator();
  for (const DeltaOrder order : kOrders) {
    const auto width = static_cast<size_t>(DeltaElementBytes(order));
    const Versions versions = RandomVersions(random, 9001, width, 300);
    const size_t changes = versions.changed.size();
    for (const SimdKernels* simd : SimdVariants()) {
      for (const size_t changes_max : {size_t{0}, changes / 2, changes - 1, changes}) {
        for (const bool in_place : {false, true}) {
          Streams streams(9001, width, changes_max);
          Bytes base = versions.old_version, copy(base.size(), 0x77);
          internal::SumState sum;
          simd->sum_begin(&sum);
          EXPECT_EQ(
              simd->delta_scan(order, base.data(), versions.new_version.data(), 9001, changes_max,
                               &streams.delta, in_place ? base.data() : copy.data(), &sum),
              changes_max == changes)
              << simd->name << " " << width << " " << changes_max;
          EXPECT_EQ(simd->sum_end(&sum),
                    XXH3_64bits(versions.new_version.data(), versions.new_version.size()));
          EXPECT_EQ(in_place ? base : copy, versions.new_version) << simd->name << " " << width;
        }
      }
    }
  }
}

/// A device's threads of a scan, of one chunk after the other, the last thread first: what each
/// writes depends on the counts alone. The counts are joined from halves.
template <typename Kind>
internal::DeltaCounts ScanByThreads(const internal::DeviceDeltaScan& job) {
  using namespace internal;
  const int64_t each = kDeltaRunBytes / static_cast<int64_t>(sizeof(typename Kind::Word));
  std::vector<DeltaRun> runs;
  for (int64_t begin = 0; begin < job.elements; begin += each) {
    runs.push_back(CountRun<Kind>(job, begin));
  }
  const std::function<DeltaRun(size_t, size_t)> joined = [&](size_t from, size_t to) {
    if (to - from < 2) return from == to ? DeltaRun{} : runs[from];
    const size_t middle = from + (to - from) / 3 + 1;
    return Joined(joined(from, middle), joined(middle, to));
  };
  const DeltaRun all = Joined(DeltaStart(), joined(0, runs.size()));
  std::vector<DeltaRun> before = {DeltaStart()};
  for (const DeltaRun& run : runs) before.push_back(Joined(before.back(), run));
  for (size_t i = runs.size(); i-- > 0;) {
    WriteRun<Kind>(job, static_cast<int64_t>(i) * each, before[i], all.changes <= job.changes_max);
  }
  return {all.gap_bytes, all.changes, all.escapes};
}

template <typename Kind>
bool ApplyByThreads(const internal::DeviceDeltaApply& job) {
  using namespace internal;
  std::vector<GapRun> before = {GapRun{}};
  for (int64_t begin = 0; begin < job.gap_bytes; begin += kDeltaRunBytes) {
    before.push_back(Joined(before.back(), CountGaps(job, begin)));
  }
  std::vector<EscapeCount> escapes = {EscapeCount{}};
  for (int64_t begin = 0; begin < job.changes; begin += kDeltaStepsCounted) {
    escapes.push_back(
        Joined(escapes.back(), EscapeCount{CountEscapes(job, begin, begin + kDeltaStepsCounted)}));
  }
  if (!DeltaFits(job, before.back(), escapes.back())) return false;
  for (size_t i = before.size() - 1; i-- > 0;) {
    ApplyGaps<Kind>(job, static_cast<int64_t>(i) * kDeltaRunBytes, before[i], escapes.data());
  }
  return true;
}

TEST(DeltaOnDevice, ThreadsMakeTheStreamsAndTheCopyAndTheWayBack) {
  auto random = SeededGenerator();
  for (const DeltaOrder order : kOrders) {
    const auto width = static_cast<size_t>(DeltaElementBytes(order));
    for (const size_t elements : {0u, 1u, 3u, 16u, 17u, 100u, 777u, 4096u, 9001u}) {
      for (const unsigned per_mille : {0u, 2u, 30u, 500u, 1000u, kEdgesOfGaps}) {
        const Versions versions = RandomVersions(random, elements, width, per_mille);
        const Defined wanted = ByDefinition(order, versions, width);
        const size_t changes = wanted.steps.size();
        for (const CopyTo to : {CopyTo::kNowhere, CopyTo::kElsewhere, CopyTo::kBase}) {
          for (const size_t changes_max : {changes, changes - (changes > 0 ? 1 : 0)}) {
            SCOPED_TRACE("order " + std::to_string(static_cast<int>(order)) + " of " +
                         std::to_string(elements) + ", " + std::to_string(per_mille) +
                         " per mille, copy " + std::to_string(static_cast<int>(to)));
            // Aligned to their elements alone, or to more.
            const size_t offset = random() % 2 * width;
            At base(versions.old_version, offset), now(versions.new_version, offset);
            At elsewhere(Bytes(versions.new_version.size(), 0x77), offset);
            Streams streams(elements, width, changes_max);
            uint8_t* const copy = to == CopyTo::kBase        ? base.data()
                                  : to == CopyTo::kElsewhere ? elsewhere.data()
                                                             : nullptr;
            const internal::DeviceDeltaScan scan{base.data(),
                                                 now.data(),
                                                 copy,
                                                 static_cast<int64_t>(elements),
                                                 static_cast<int64_t>(changes_max),
                                                 streams.gaps.data(),
                                                 streams.steps.data(),
                                                 streams.escapes.data()};
            const auto counts = internal::VisitDeltaOrder(
                order, [&](auto kind) { return ScanByThreads<decltype(kind)>(scan); });
            ASSERT_EQ(counts.changes, static_cast<int64_t>(changes));
            ASSERT_EQ(base.bytes(),
                      to == CopyTo::kBase ? versions.new_version : versions.old_version);
            if (to == CopyTo::kElsewhere) {
              ASSERT_EQ(elsewhere.bytes(), versions.new_version);
            }
            if (changes_max < changes) {
              ASSERT_EQ(streams.steps, Bytes(streams.steps.size()));
              continue;
            }
            ASSERT_EQ(First(streams.gaps, static_cast<size_t>(counts.gap_bytes)), wanted.gaps);
            ASSERT_EQ(First(streams.steps, changes), wanted.steps);
            ASSERT_EQ(First(streams.escapes, static_cast<size_t>(counts.escapes) * width),
                      wanted.escapes);
            At target(versions.old_version, offset);
            const internal::DeviceDeltaApply apply{
                target.data(),          static_cast<int64_t>(elements),
                streams.gaps.data(),    streams.steps.data(),
                streams.escapes.data(), counts.gap_bytes,
                counts.changes,         counts.escapes};
            ASSERT_TRUE(internal::VisitDeltaOrder(
                order, [&](auto kind) { return ApplyByThreads<decltype(kind)>(apply); }));
            ASSERT_EQ(target.bytes(), versions.new_version);
          }
        }
      }
    }
  }
}

TEST(DeltaOnDevice, ThreadsRefuseWhatTheCpuRefuses) {
  auto random = SeededGenerator();
  int restored = 0;
  for (int i = 0; i < 20'000; ++i) {
    const size_t elements = random() % (i % 2 == 0 ? 60 : 1500);
    Bytes gaps(random() % 24), steps(random() % 8), escapes(random() % 3 * 2);
    for (auto& byte : gaps) byte = static_cast<uint8_t>(random() % 12 == 0 ? 255 : random() % 6);
    for (auto& byte : steps) byte = static_cast<uint8_t>(random() % 17);
    const DeltaStreams delta{gaps.data(), steps.data(), escapes.data(),
                             gaps.size(), steps.size(), escapes.size() / 2};
    const internal::DeviceDeltaApply apply{nullptr,
                                           static_cast<int64_t>(elements),
                                           gaps.data(),
                                           steps.data(),
                                           escapes.data(),
                                           static_cast<int64_t>(gaps.size()),
                                           static_cast<int64_t>(steps.size()),
                                           static_cast<int64_t>(escapes.size() / 2)};
    Bytes on_cpu(elements * 2, 0x5a), on_device = on_cpu;
    auto job = apply;
    job.target = on_device.data();
    const bool fits = ApplyByThreads<internal::DeltaKind<uint16_t, true>>(job);
    ASSERT_EQ(fits, DeltaApply(DeltaOrder::kFloat16, on_cpu.data(), elements, delta));
    if (!fits) {
      ASSERT_EQ(on_device, Bytes(elements * 2, 0x5a));
      continue;
    }
    ++restored;
    ASSERT_EQ(on_device, on_cpu);
  }
  EXPECT_GT(restored, 100);
}

TEST(DeltaApply, StaysWithinTheArrayWhateverTheStreamsHold) {
  auto random = SeededGenerator();
  int restored = 0, refused = 0;
  for (int i = 0; i < 30'000; ++i) {
    const DeltaOrder order = kOrders[random() % std::size(kOrders)];
    const auto width = static_cast<size_t>(DeltaElementBytes(order));
    const size_t elements = random() % 40;
    // Each in memory of its own size: AddressSanitizer sees a byte too many.
    Bytes gaps(random() % 12), steps(random() % 12), escapes(random() % 4 * width);
    for (auto& byte : gaps) byte = static_cast<uint8_t>(random() % 8 == 0 ? 255 : random() % 8);
    for (auto& byte : steps) byte = static_cast<uint8_t>(random() % 17);
    for (auto& byte : escapes) byte = static_cast<uint8_t>(random());
    const DeltaStreams delta{gaps.data(), steps.data(), escapes.data(),
                             gaps.size(), steps.size(), escapes.size() / width};
    const Bytes base(elements * width, 0x5a);
    Bytes target = base, made(base.size());
    const bool fits = DeltaApply(order, target.data(), elements, delta);
    (fits ? restored : refused) += 1;
    uint64_t sum = 0;
    ASSERT_EQ(DeltaApplyTo(order, made.data(), base.data(), elements, delta, sum), fits);
    if (!fits) continue;
    ASSERT_EQ(made, target);
    ASSERT_EQ(sum, XXH3_64bits(target.data(), target.size()));
  }
  EXPECT_GT(restored, 100);
  EXPECT_GT(refused, 10'000);
}

TEST(DeltaApply, RefusesStreamsThatDoNotEndTogether) {
  uint16_t old_version[6] = {}, new_version[6] = {0, 1, 0, 0x4000, 0, 2};
  Streams streams(6, 2, 6);
  ASSERT_TRUE(DeltaScan(DeltaOrder::kFloat16, old_version, new_version, 6, 6, streams.delta));
  ASSERT_EQ(streams.delta.changes, 3u);
  ASSERT_EQ(streams.delta.escape_count, 1u);
  const auto applied = [&](auto change) {
    DeltaStreams delta = streams.delta;
    change(delta);
    uint16_t target[6] = {};
    uint64_t sum = 0;
    const bool elsewhere = DeltaApplyTo(DeltaOrder::kFloat16, target, old_version, 6, delta, sum);
    const bool in_place = DeltaApply(DeltaOrder::kFloat16, old_version, 6, delta);
    std::fill_n(old_version, 6, 0);
    EXPECT_EQ(elsewhere, in_place);
    return in_place;
  };
  EXPECT_TRUE(applied([](DeltaStreams&) {}));
  EXPECT_FALSE(applied([](DeltaStreams& delta) { --delta.gap_bytes; }));
  EXPECT_FALSE(applied([](DeltaStreams& delta) { ++delta.gap_bytes; }));
  EXPECT_FALSE(applied([](DeltaStreams& delta) { --delta.changes; }));
  EXPECT_FALSE(applied([](DeltaStreams& delta) { --delta.escape_count; }));
  EXPECT_FALSE(applied([](DeltaStreams& delta) { ++delta.escape_count; }));
}

}  // namespace
}  // namespace weightwire::kernels
