#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

/// Internal to kernels/: the order of kernels/delta.h, for the scan, which is compiled once per
/// instruction set, and for its way back.
namespace weightwire::kernels::internal {

template <typename Word>
static inline Word LoadWord(const unsigned char* at) {
  Word word;
  memcpy(&word, at, sizeof word);
  return word;
}

template <typename Word>
inline constexpr Word kTopBit = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));

/// The element's place among all of its kind.
template <typename Word, bool kFloat>
static inline Word PlaceOf(Word bits) {
  if (!kFloat) return bits;
  return static_cast<Word>((bits & kTopBit<Word>) != 0 ? ~bits : bits | kTopBit<Word>);
}
template <typename Word, bool kFloat>
static inline Word AtPlace(Word place) {
  if (!kFloat) return place;
  return static_cast<Word>((place & kTopBit<Word>) != 0 ? place ^ kTopBit<Word> : ~place);
}

/// 0, 1, 2, 3, 4 … for 0, -1, +1, -2, +2 …
template <typename Word>
static inline Word ZigZag(Word step) {
  const Word sign = static_cast<Word>((step & kTopBit<Word>) != 0 ? ~Word{0} : Word{0});
  return static_cast<Word>(static_cast<Word>(step << 1) ^ sign);
}
template <typename Word>
static inline Word FromZigZag(Word zigzag) {
  const Word sign = static_cast<Word>((zigzag & 1) != 0 ? ~Word{0} : Word{0});
  return static_cast<Word>(static_cast<Word>(zigzag >> 1) ^ sign);
}

}  // namespace weightwire::kernels::internal
