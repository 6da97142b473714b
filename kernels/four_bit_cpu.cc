#include "kernels/four_bit.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "kernels/element.h"
#include "kernels/simd.h"

namespace weightwire::kernels {
namespace {

size_t IndexOf(Element from) {
  if (from >= Element::kBF16)
    return static_cast<size_t>(from) - static_cast<size_t>(Element::kBF16);
  std::fprintf(stderr, "kernels: element kind %d is no float and cannot be quantized\n",
               static_cast<int>(from));
  std::abort();
}

}  // namespace

float NvFp4Global(float amax, Element from, FourBitKind kind) {
  if (!std::isfinite(amax)) return std::numeric_limits<float>::quiet_NaN();
  if (kind == FourBitKind::kNvFp4Modelopt) return amax / 2688.0f;
  const float least = from == Element::kF16 ? 0x1p-14f : std::numeric_limits<float>::min();
  const auto in_kind = [from](float value) {
    return internal::AsFloat(internal::InKind(internal::AsBits(value), from));
  };
  const float global = in_kind(2688.0f * in_kind(1.0f / std::fmax(amax, least)));
  return std::isinf(global) ? 1.0f : global;
}

float LargestMagnitude(const void* source, int64_t count, Element from) {
  return internal::AsFloat(
      internal::Simd().amax[IndexOf(from)](source, static_cast<size_t>(count)));
}

void QuantizeFourBit(void* codes, void* scales, const void* source, int64_t rows, int64_t columns,
                     int64_t group, Element from, FourBitKind kind, float global) {
  const size_t index = IndexOf(from);
  if (group < 8 || group > 256 || group % 8 != 0 || columns % group != 0) {
    std::fprintf(stderr, "kernels: groups of %lld of %lld columns\n", static_cast<long long>(group),
                 static_cast<long long>(columns));
    std::abort();
  }
  internal::Simd().four_bit[index](codes, scales, source,
                                   static_cast<size_t>(rows * columns / group),
                                   static_cast<size_t>(group), kind, global);
}

}  // namespace weightwire::kernels
