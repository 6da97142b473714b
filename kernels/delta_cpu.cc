#include "kernels/delta.h"

#include "kernels/delta_words.h"
#include "kernels/simd.h"

namespace weightwire::kernels {
namespace {

template <typename Word, bool kFloat>
bool Apply(void* target, size_t elements, const DeltaStreams& delta) {
  using namespace internal;
  auto* to = static_cast<unsigned char*>(target);
  size_t gap_at = 0, escape_at = 0;
  size_t next = 0;  // behind the last change; at most `elements`
  for (size_t i = 0; i < delta.changes; ++i) {
    size_t gap = 0;
    while (true) {
      if (gap_at == delta.gap_bytes) return false;
      const uint8_t byte = delta.gaps[gap_at++];
      gap += byte;
      if (gap >= elements - next) return false;
      if (byte < kDeltaGapMax) break;
    }
    next += gap;
    Word zigzag;
    if (delta.steps[i] >= kDeltaEscape) {
      if (escape_at == delta.escape_count) return false;
      zigzag = LoadWord<Word>(delta.escapes + escape_at++ * sizeof(Word));
    } else {
      zigzag = static_cast<Word>(delta.steps[i] + 1u);
    }
    unsigned char* at = to + next * sizeof(Word);
    const Word place = PlaceOf<Word, kFloat>(LoadWord<Word>(at));
    const Word made = AtPlace<Word, kFloat>(static_cast<Word>(place + FromZigZag(zigzag)));
    memcpy(at, &made, sizeof made);
    ++next;
  }
  return gap_at == delta.gap_bytes && escape_at == delta.escape_count;
}

}  // namespace

int DeltaElementBytes(DeltaOrder order) {
  constexpr int kBytes[kDeltaOrders] = {1, 2, 4, 8, 1, 2, 4};
  return kBytes[static_cast<int>(order)];
}

bool DeltaScan(DeltaOrder order, const void* base, const void* now, size_t elements,
               size_t changes_max, DeltaStreams& out) {
  return internal::Simd().delta_scan[static_cast<int>(order)](base, now, elements, changes_max,
                                                              &out);
}

bool DeltaApply(DeltaOrder order, void* target, size_t elements, const DeltaStreams& delta) {
  switch (order) {
    case DeltaOrder::kBits8:
      return Apply<uint8_t, false>(target, elements, delta);
    case DeltaOrder::kBits16:
      return Apply<uint16_t, false>(target, elements, delta);
    case DeltaOrder::kBits32:
      return Apply<uint32_t, false>(target, elements, delta);
    case DeltaOrder::kBits64:
      return Apply<uint64_t, false>(target, elements, delta);
    case DeltaOrder::kFloat8:
      return Apply<uint8_t, true>(target, elements, delta);
    case DeltaOrder::kFloat16:
      return Apply<uint16_t, true>(target, elements, delta);
    case DeltaOrder::kFloat32:
      return Apply<uint32_t, true>(target, elements, delta);
  }
  return false;
}

}  // namespace weightwire::kernels
