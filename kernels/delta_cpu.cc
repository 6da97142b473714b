#include "kernels/delta.h"

#include <algorithm>

#include "kernels/delta_words.h"
#include "kernels/simd.h"

namespace weightwire::kernels {
namespace {

/// Changes that are looked for ahead of being made: as many lines are on their way at once.
constexpr size_t kAhead = 64;

template <typename Word, bool kFloat>
bool Apply(void* target, size_t elements, const DeltaStreams& delta) {
  using namespace internal;
  auto* to = static_cast<unsigned char*>(target);
  const uint8_t* gap_at = delta.gaps;
  const uint8_t* const gaps_end = gap_at + delta.gap_bytes;
  size_t escape_at = 0;
  size_t next = 0;  // behind the last change; at most `elements`
  unsigned char* places[kAhead];
  for (size_t first = 0; first < delta.changes; first += kAhead) {
    const size_t here = std::min(kAhead, delta.changes - first);
    for (size_t i = 0; i < here; ++i) {
      size_t gap = 0;
      while (true) {
        if (gap_at == gaps_end) return false;
        const uint8_t byte = *gap_at++;
        gap += byte;
        if (gap >= elements - next) return false;
        if (byte < kDeltaGapMax) break;
      }
      next += gap;
      places[i] = to + next * sizeof(Word);
      __builtin_prefetch(places[i], 1, 3);
      ++next;
    }
    for (size_t i = 0; i < here; ++i) {
      const uint8_t step = delta.steps[first + i];
      auto zigzag = static_cast<Word>(step + 1u);
      if (step >= kDeltaEscape) {
        if (escape_at == delta.escape_count) return false;
        zigzag = LoadWord<Word>(delta.escapes + escape_at++ * sizeof(Word));
      }
      const Word place = PlaceOf<Word, kFloat>(LoadWord<Word>(places[i]));
      const Word made = AtPlace<Word, kFloat>(static_cast<Word>(place + FromZigZag(zigzag)));
      memcpy(places[i], &made, sizeof made);
    }
  }
  return gap_at == gaps_end && escape_at == delta.escape_count;
}

}  // namespace

int DeltaElementBytes(DeltaOrder order) {
  return internal::VisitDeltaOrder(
      order, [](auto kind) { return static_cast<int>(sizeof(typename decltype(kind)::Word)); });
}

bool DeltaScan(DeltaOrder order, const void* base, const void* now, size_t elements,
               size_t changes_max, DeltaStreams& out, void* copy, uint64_t* sum) {
  const internal::SimdKernels& simd = internal::Simd();
  internal::SumState state;
  if (sum != nullptr) simd.sum_begin(&state);
  const bool fits = simd.delta_scan(order, base, now, elements, changes_max, &out, copy,
                                    sum != nullptr ? &state : nullptr);
  if (sum != nullptr) *sum = simd.sum_end(&state);
  return fits;
}

bool DeltaApply(DeltaOrder order, void* target, size_t elements, const DeltaStreams& delta) {
  return internal::VisitDeltaOrder(order, [&](auto kind) {
    return Apply<typename decltype(kind)::Word, decltype(kind)::kFloat>(target, elements, delta);
  });
}

bool DeltaApplyTo(DeltaOrder order, void* target, const void* base, size_t elements,
                  const DeltaStreams& delta, uint64_t& sum) {
  const internal::SimdKernels& simd = internal::Simd();
  internal::SumState state;
  simd.sum_begin(&state);
  if (!simd.delta_apply(order, target, base, elements, &delta, &state)) return false;
  sum = simd.sum_end(&state);
  return true;
}

}  // namespace weightwire::kernels
