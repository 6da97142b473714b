// Casts of boxes. Long runs that are contiguous on both sides are cast in place to place. All else
// goes by slabs: gathered into a packed buffer, cast there, scattered; so that short runs and
// transposes cost what the copy of them costs.
#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/strided.h"

namespace weightwire::kernels::internal {
namespace {

constexpr int64_t kRunElements = 64;
constexpr int64_t kSlabElements = 4096;
constexpr int64_t kElementBytesMax = 4;

using CastRun = void (*)(void* target, const void* source, size_t count);

CastRun ChooseCast(Element from, Element to) {
  auto index = [](Element e) { return static_cast<int>(e) - static_cast<int>(Element::kBF16); };
  return Simd().cast[index(from)][index(to)];
}

void CastSlabs(CastRun cast, unsigned char* target, const unsigned char* source,
               const StridedBox& box, int64_t from_bytes, int64_t to_bytes) {
  alignas(64) unsigned char gathered[kSlabElements * kElementBytesMax];
  alignas(64) unsigned char converted[kSlabElements * kElementBytesMax];
  ForEachSlab(
      box, kSlabElements,
      [&](const StridedBox& slab, int64_t source_offset, int64_t target_offset) {
        CopyBits(gathered, source + source_offset * from_bytes, WithPackedTarget(slab), from_bytes);
        cast(converted, gathered, static_cast<size_t>(ElementsFrom(slab, 0)));
        CopyBits(target + target_offset * to_bytes, converted, WithPackedSource(slab), to_bytes);
      });
}

}  // namespace

void CastBox(unsigned char* target, const unsigned char* source, const StridedBox& box,
             Element from, Element to) {
  CastRun cast = ChooseCast(from, to);
  const int64_t from_bytes = ElementBytes(from);
  const int64_t to_bytes = ElementBytes(to);
  StridedBox normal = Normalize(box);
  int last = normal.ndim - 1;
  bool long_runs = last >= 0 && normal.source_stride[last] == 1 &&
                   normal.target_stride[last] == 1 && normal.extent[last] >= kRunElements;
  if (!long_runs) return CastSlabs(cast, target, source, normal, from_bytes, to_bytes);
  auto count = static_cast<size_t>(normal.extent[last]);
  ForEachIndex(normal, last, [&](int64_t source_offset, int64_t target_offset) {
    cast(target + target_offset * to_bytes, source + source_offset * from_bytes, count);
  });
}

}  // namespace weightwire::kernels::internal
