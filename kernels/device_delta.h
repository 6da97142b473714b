#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/delta_words.h"
#include "kernels/device.h"

/// Internal to kernels/: what each device thread does for kernels/delta.h, as functions that the
/// CPU tests run thread by thread, like kernels/device.h.
///
/// Where an entry of a stream goes depends on all elements before it. So a scan counts first: each
/// thread its elements, and prefixes over threads and chunks tell each where its entries begin.
/// Then each writes its own.
namespace weightwire::kernels::internal {

/// Of each array, and bytes of a stream of gaps, that one thread looks at.
constexpr int kDeltaRunBytes = 16;
/// What one block of threads looks at.
constexpr int kDeltaThreads = 256;
constexpr int kDeltaChunkBytes = kDeltaThreads * kDeltaRunBytes;
/// Steps that one count of escapes stands for.
constexpr int kDeltaStepsCounted = 256;

WW_HOST_DEVICE int64_t DeltaChunks(int64_t bytes) {
  return (bytes + kDeltaChunkBytes - 1) / kDeltaChunkBytes;
}
WW_HOST_DEVICE int64_t StepCounts(int64_t changes) {
  return (changes + kDeltaStepsCounted - 1) / kDeltaStepsCounted;
}

struct DeviceDeltaScan {
  const unsigned char* base;
  const unsigned char* now;
  unsigned char* copy;  ///< null, elsewhere, or `base`
  int64_t elements;
  int64_t changes_max;
  uint8_t* gaps;
  uint8_t* steps;
  unsigned char* escapes;
};

struct DeviceDeltaApply {
  unsigned char* target;
  int64_t elements;
  const uint8_t* gaps;
  const uint8_t* steps;
  const unsigned char* escapes;
  int64_t gap_bytes;
  int64_t changes;
  int64_t escape_count;
};

/// What a scan has made of each stream.
struct DeltaCounts {
  int64_t gap_bytes;
  int64_t changes;
  int64_t escapes;
};

/// What changed among consecutive elements, and how much of the streams that takes. All 0 where
/// nothing did, which is neutral in Joined, as it is of the other two.
struct DeltaRun {
  int64_t changes;
  int64_t escapes;
  int64_t gap_bytes;  ///< of all changes but the first, whose gap begins before the run
  int64_t first;      ///< element that changed, counted from 2; 1: what comes before all of them
  int64_t last;
};
WW_HOST_DEVICE DeltaRun DeltaStart() { return {0, 0, 0, 1, 1}; }

WW_HOST_DEVICE int64_t GapBytesOf(int64_t gap) {
  return gap / static_cast<int64_t>(kDeltaGapMax) + 1;
}

/// Of `b` behind `a`. Associative.
WW_HOST_DEVICE DeltaRun Joined(const DeltaRun& a, const DeltaRun& b) {
  if (b.first == 0) return a;
  if (a.first == 0) return b;
  return {a.changes + b.changes, a.escapes + b.escapes,
          a.gap_bytes + b.gap_bytes + GapBytesOf(b.first - a.last - 1), a.first, b.last};
}

/// Bytes of a stream of gaps: what they add up to, and how many changes end in them.
struct GapRun {
  int64_t unchanged;
  int64_t changes;
};
WW_HOST_DEVICE GapRun Joined(const GapRun& a, const GapRun& b) {
  return {a.unchanged + b.unchanged, a.changes + b.changes};
}

struct EscapeCount {
  int64_t escapes;
};
WW_HOST_DEVICE EscapeCount Joined(const EscapeCount& a, const EscapeCount& b) {
  return {a.escapes + b.escapes};
}

/// The elements of one thread, all 16 bytes at once where they lie so.
template <typename Word>
struct DeltaWords {
  static constexpr int kCount = kDeltaRunBytes / static_cast<int>(sizeof(Word));
  Word words[kCount];
  int count;

  WW_HOST_DEVICE_MEMBER DeltaWords(const unsigned char* array, int64_t begin, int64_t elements)
      : count(elements - begin < kCount ? static_cast<int>(elements - begin) : kCount) {
    const unsigned char* at = array + begin * static_cast<int64_t>(sizeof(Word));
    if (count == kCount && reinterpret_cast<uintptr_t>(at) % kDeltaRunBytes == 0) {
      const SixteenBytes all = LoadAs<SixteenBytes>(at);
      memcpy(words, &all, sizeof words);
      return;
    }
    for (int i = 0; i < count; ++i) words[i] = LoadAs<Word>(at + i * sizeof(Word));
  }
};

template <typename Kind>
WW_HOST_DEVICE typename Kind::Word ZigZagBetween(typename Kind::Word was, typename Kind::Word is) {
  using Word = typename Kind::Word;
  return ZigZag(
      static_cast<Word>(PlaceOf<Word, Kind::kFloat>(is) - PlaceOf<Word, Kind::kFloat>(was)));
}

/// The run of the thread whose elements begin at `begin` < elements.
template <typename Kind>
WW_HOST_DEVICE DeltaRun CountRun(const DeviceDeltaScan& job, int64_t begin) {
  using Words = DeltaWords<typename Kind::Word>;
  const Words was(job.base, begin, job.elements), is(job.now, begin, job.elements);
  DeltaRun run{};
  for (int i = 0; i < was.count; ++i) {
    if (was.words[i] == is.words[i]) continue;
    const int64_t index = begin + i;
    const bool escape = ZigZagBetween<Kind>(was.words[i], is.words[i]) > kDeltaEscape;
    run = Joined(run, {1, escape ? 1 : 0, 0, index + 2, index + 2});
  }
  return run;
}

/// Writes the entries of that thread, and its part of the copy. `before` is what all elements
/// before it have taken; `streams`: there is room for the streams.
template <typename Kind>
WW_HOST_DEVICE void WriteRun(const DeviceDeltaScan& job, int64_t begin, const DeltaRun& before,
                             bool streams) {
  using Word = typename Kind::Word;
  const DeltaWords<Word> was(job.base, begin, job.elements), is(job.now, begin, job.elements);
  uint8_t* gap_at = job.gaps + before.gap_bytes;
  uint8_t* step_at = job.steps + before.changes;
  unsigned char* escape_at = job.escapes + before.escapes * static_cast<int64_t>(sizeof(Word));
  int64_t next = before.last - 1;
  for (int i = 0; i < was.count; ++i) {
    unsigned char* const copy = job.copy + (begin + i) * static_cast<int64_t>(sizeof(Word));
    if (was.words[i] == is.words[i]) {
      if (job.copy != nullptr && job.copy != job.base) StoreAs(copy, is.words[i]);
      continue;
    }
    if (job.copy != nullptr) StoreAs(copy, is.words[i]);
    if (!streams) continue;
    int64_t gap = begin + i - next;
    next = begin + i + 1;
    for (; gap >= static_cast<int64_t>(kDeltaGapMax); gap -= kDeltaGapMax) *gap_at++ = 255;
    *gap_at++ = static_cast<uint8_t>(gap);
    const Word zigzag = ZigZagBetween<Kind>(was.words[i], is.words[i]);
    if (zigzag <= kDeltaEscape) {
      *step_at++ = static_cast<uint8_t>(zigzag - 1u);
    } else {
      *step_at++ = kDeltaEscape;
      StoreAs(escape_at, zigzag);
      escape_at += sizeof(Word);
    }
  }
}

WW_HOST_DEVICE GapRun CountGaps(const DeviceDeltaApply& job, int64_t begin) {
  GapRun run{};
  for (int64_t i = begin; i < begin + kDeltaRunBytes && i < job.gap_bytes; ++i) {
    run.unchanged += job.gaps[i];
    run.changes += job.gaps[i] < kDeltaGapMax ? 1 : 0;
  }
  return run;
}

/// The most of a stream of gaps.
WW_HOST_DEVICE int64_t GapBytesMost(int64_t elements, int64_t changes) {
  return changes + elements / static_cast<int64_t>(kDeltaGapMax);
}
/// Memory that a scan and an apply need meanwhile: what each chunk has, and the whole behind it.
WW_HOST_DEVICE int64_t DeltaScratchBytes(int64_t elements, int64_t element_bytes) {
  const int64_t scan = (DeltaChunks(elements * element_bytes) + 1) * int64_t{sizeof(DeltaRun)};
  const int64_t apply =
      (DeltaChunks(GapBytesMost(elements, elements)) + 1) * int64_t{sizeof(GapRun)} +
      (StepCounts(elements) + 1) * int64_t{sizeof(EscapeCount)};
  return scan > apply ? scan : apply;
}

WW_HOST_DEVICE int64_t CountEscapes(const DeviceDeltaApply& job, int64_t begin, int64_t end) {
  int64_t escapes = 0;
  for (int64_t i = begin; i < end && i < job.changes; ++i) {
    escapes += job.steps[i] >= kDeltaEscape ? 1 : 0;
  }
  return escapes;
}

/// Whether the streams end together within the array: places only grow, so the last one tells.
WW_HOST_DEVICE bool DeltaFits(const DeviceDeltaApply& job, const GapRun& gaps,
                              const EscapeCount& steps) {
  return gaps.changes == job.changes && gaps.unchanged + gaps.changes <= job.elements &&
         steps.escapes == job.escape_count &&
         (job.gap_bytes == 0 || job.gaps[job.gap_bytes - 1] < kDeltaGapMax);
}

/// Makes the changes whose gaps end within the thread's bytes. `before`: of all bytes before them;
/// `escapes_before`: of each kDeltaStepsCounted steps, the escapes before them. The streams fit.
template <typename Kind>
WW_HOST_DEVICE void ApplyGaps(const DeviceDeltaApply& job, int64_t begin, const GapRun& before,
                              const EscapeCount* escapes_before) {
  using Word = typename Kind::Word;
  int64_t change = before.changes;
  int64_t place = before.unchanged + before.changes;
  int64_t escape = -1;  // not looked for yet: few are
  for (int64_t i = begin; i < begin + kDeltaRunBytes && i < job.gap_bytes; ++i) {
    place += job.gaps[i];
    if (job.gaps[i] >= kDeltaGapMax) continue;
    const uint8_t step = job.steps[change];
    auto zigzag = static_cast<Word>(step + 1u);
    if (step >= kDeltaEscape) {
      if (escape < 0) {
        const int64_t counted = change / kDeltaStepsCounted;
        escape = escapes_before[counted].escapes +
                 CountEscapes(job, counted * kDeltaStepsCounted, change);
      }
      zigzag = LoadAs<Word>(job.escapes + escape++ * static_cast<int64_t>(sizeof(Word)));
    }
    unsigned char* const at = job.target + place * static_cast<int64_t>(sizeof(Word));
    const Word was = PlaceOf<Word, Kind::kFloat>(LoadAs<Word>(at));
    StoreAs(at, AtPlace<Word, Kind::kFloat>(static_cast<Word>(was + FromZigZag(zigzag))));
    ++change;
    ++place;
  }
}

}  // namespace weightwire::kernels::internal
