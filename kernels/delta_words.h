#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/delta.h"
#include "kernels/element.h"

/// Internal to kernels/: the orders of kernels/delta.h, for the scan, which is compiled once per
/// instruction set, and for its way back. All of it is static for the scan's sake.
namespace weightwire::kernels::internal {

/// The element of an order.
template <typename W, bool kIsFloat>
struct DeltaKind {
  using Word = W;
  static constexpr bool kFloat = kIsFloat;
};

/// `visit` of the order's DeltaKind; what is not an order gives 0 or false.
template <typename Visit>
static inline auto VisitDeltaOrder(DeltaOrder order, Visit visit)
    -> decltype(visit(DeltaKind<uint8_t, false>{})) {
  switch (order) {
    case DeltaOrder::kBits8:
      return visit(DeltaKind<uint8_t, false>{});
    case DeltaOrder::kBits16:
      return visit(DeltaKind<uint16_t, false>{});
    case DeltaOrder::kBits32:
      return visit(DeltaKind<uint32_t, false>{});
    case DeltaOrder::kBits64:
      return visit(DeltaKind<uint64_t, false>{});
    case DeltaOrder::kFloat8:
      return visit(DeltaKind<uint8_t, true>{});
    case DeltaOrder::kFloat16:
      return visit(DeltaKind<uint16_t, true>{});
    case DeltaOrder::kFloat32:
      return visit(DeltaKind<uint32_t, true>{});
  }
  return {};
}

template <typename Word>
WW_HOST_DEVICE Word LoadWord(const unsigned char* at) {
  Word word;
  memcpy(&word, at, sizeof word);
  return word;
}

template <typename Word>
inline constexpr Word kTopBit = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));

/// All ones where the top bit is set, else 0. Arithmetic, as signs of weights are not foretold.
template <typename Word>
WW_HOST_DEVICE Word TopBitEverywhere(Word word) {
  return static_cast<Word>(Word{0} - static_cast<Word>(word >> (8 * sizeof(Word) - 1)));
}

/// The element's place among all of its kind.
template <typename Word, bool kFloat>
WW_HOST_DEVICE Word PlaceOf(Word bits) {
  if (!kFloat) return bits;
  return static_cast<Word>(bits ^ (TopBitEverywhere(bits) | kTopBit<Word>));
}
template <typename Word, bool kFloat>
WW_HOST_DEVICE Word AtPlace(Word place) {
  if (!kFloat) return place;
  const auto flipped = static_cast<Word>(~TopBitEverywhere(place));
  return static_cast<Word>(place ^ (flipped | kTopBit<Word>));
}

/// 0, 1, 2, 3, 4 … for 0, -1, +1, -2, +2 …
template <typename Word>
WW_HOST_DEVICE Word ZigZag(Word step) {
  return static_cast<Word>(static_cast<Word>(step << 1) ^ TopBitEverywhere(step));
}
template <typename Word>
WW_HOST_DEVICE Word FromZigZag(Word zigzag) {
  return static_cast<Word>(static_cast<Word>(zigzag >> 1) ^ (Word{0} - (zigzag & Word{1})));
}

}  // namespace weightwire::kernels::internal
