// Sums of boxes. Contiguous memory is hashed as it lies; long runs are fed to a streaming XXH3 one
// by one; boxes of short runs, and casts, go by slabs that are copied into a packed buffer which
// stays in the cache. Copy-and-sum of long runs hashes each block on its way to the target; of
// short runs, and casts, it copies a little and hashes what it has just written.
#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/simd.h"
#include "kernels/strided.h"

namespace weightwire::kernels {
namespace {

using internal::ElementsFrom;
using internal::ForEachIndex;
using internal::ForEachSlab;
using internal::KeepsBits;
using internal::SimdKernels;

// Shorter runs are better gathered first: a stream keeps up to 256 B back at each feeding.
constexpr int64_t kRunBytes = 2048;
constexpr int64_t kPackedBytes = 64 << 10;
// Copied, then read back while in the second-level cache.
constexpr int64_t kWarmBytes = 64 << 10;
constexpr int64_t kTransposedRows = 64;

class Sum {
 public:
  Sum() { simd_.sum_begin(&state_); }
  void Add(const void* data, int64_t bytes) {
    simd_.sum_add(&state_, data, static_cast<size_t>(bytes));
  }
  void CopyAndAdd(void* target, const void* source, int64_t bytes) {
    simd_.copy_and_add(&state_, target, source, static_cast<size_t>(bytes));
  }
  void SeeCopyAndAdd(Sum& seen_sum, const void* seen, void* target, const void* source,
                     int64_t bytes) {
    simd_.see_copy_and_add(&seen_sum.state_, &state_, seen, target, source,
                           static_cast<size_t>(bytes));
  }
  uint64_t End() const { return simd_.sum_end(&state_); }

 private:
  const SimdKernels& simd_ = internal::Simd();
  internal::SumState state_;
};

StridedBox NormalSource(StridedBox box) {
  std::copy(box.source_stride, box.source_stride + box.ndim, box.target_stride);
  return Normalize(box);
}

StridedBox NormalTarget(const StridedBox& box) { return Normalize(WithTargetOnBothSides(box)); }

void AddPacked(Sum& sum, const unsigned char* data, const StridedBox& box, Element from,
               Element to) {
  alignas(64) unsigned char packed[kPackedBytes];
  const int64_t from_bytes = ElementBytes(from);
  const int64_t to_bytes = ElementBytes(to);
  ForEachSlab(box, kPackedBytes / to_bytes, [&](const StridedBox& slab, int64_t offset, int64_t) {
    Copy(packed, data + offset * from_bytes, WithPackedTarget(slab), from, to);
    sum.Add(packed, ElementsFrom(slab, 0) * to_bytes);
  });
}

/// `box` is normalised with the strides of this side alone.
void AddBox(Sum& sum, const unsigned char* data, const StridedBox& box, Element element) {
  const int element_bytes = ElementBytes(element);
  int64_t run = SourceRunBytes(box, element_bytes);
  if (ElementsFrom(box, 0) * element_bytes == run) return sum.Add(data, run);
  if (run < kRunBytes) return AddPacked(sum, data, box, element, element);
  ForEachIndex(box, box.ndim - 1,
               [&](int64_t offset, int64_t) { sum.Add(data + offset * element_bytes, run); });
}

uint64_t SumBox(const void* data, const StridedBox& box, Element element) {
  Sum sum;
  AddBox(sum, static_cast<const unsigned char*>(data), box, element);
  return sum.End();
}

/// Bytes of the runs that are long enough to be copied and summed one by one; 0: they are not, or
/// are cast.
int64_t LongRun(const StridedBox& normal, Element from, Element to) {
  const int64_t run = std::min(SourceRunBytes(normal, ElementBytes(from)),
                               TargetRunBytes(normal, ElementBytes(to)));
  return KeepsBits(from, to) && run >= kRunBytes ? run : 0;
}

/// Calls visit(source_offset, target_offset), in bytes, for each run of a box that has a LongRun.
template <class Visit>
void ForEachRun(const StridedBox& normal, Element element, Visit visit) {
  const int64_t bytes = ElementBytes(element);
  ForEachIndex(normal, std::max(0, normal.ndim - 1),
               [&](int64_t source, int64_t target) { visit(source * bytes, target * bytes); });
}

/// Fewer rows would read a line of a transposed source several times.
int64_t SlabElements(const StridedBox& box, int64_t target_bytes) {
  int64_t row = box.ndim > 0 ? box.extent[box.ndim - 1] : 1;
  bool transposed =
      box.ndim > 1 && box.source_stride[box.ndim - 1] > box.source_stride[box.ndim - 2];
  return std::max(kWarmBytes / target_bytes, transposed ? kTransposedRows * row : 0);
}

}  // namespace

uint64_t SumContiguous(const void* data, size_t bytes) { return internal::Simd().sum(data, bytes); }

static_assert(sizeof(RunningSum) == sizeof(internal::SumState));

RunningSum::RunningSum() {
  internal::Simd().sum_begin(reinterpret_cast<internal::SumState*>(&state_));
}
void RunningSum::CopyAndAdd(void* target, const void* source, size_t bytes) {
  internal::Simd().add_and_stream(reinterpret_cast<internal::SumState*>(&state_), target, source,
                                  bytes);
}
void RunningSum::CopiesEnd() { internal::Simd().stream_end(); }
uint64_t RunningSum::End() const {
  return internal::Simd().sum_end(reinterpret_cast<const internal::SumState*>(&state_));
}

uint64_t SumTarget(const void* target, const StridedBox& box, Element element) {
  return SumBox(target, NormalTarget(box), element);
}

uint64_t SumSource(const void* source, const StridedBox& box, Element from, Element to) {
  internal::RequireCast(from, to);
  if (KeepsBits(from, to)) return SumBox(source, NormalSource(box), from);
  Sum sum;
  AddPacked(sum, static_cast<const unsigned char*>(source), NormalSource(box), from, to);
  return sum.End();
}

uint64_t CopyAndSumTarget(void* target, const void* source, const StridedBox& box, Element from,
                          Element to) {
  internal::RequireCast(from, to);
  auto* target_bytes = static_cast<unsigned char*>(target);
  auto* source_bytes = static_cast<const unsigned char*>(source);
  const int from_bytes = ElementBytes(from);
  const int to_bytes = ElementBytes(to);
  StridedBox normal = Normalize(box);
  Sum sum;
  if (const int64_t run = LongRun(normal, from, to)) {
    ForEachRun(normal, to, [&](int64_t source_offset, int64_t target_offset) {
      sum.CopyAndAdd(target_bytes + target_offset, source_bytes + source_offset, run);
    });
    internal::Simd().stream_end();
    return sum.End();
  }
  ForEachSlab(normal, SlabElements(normal, to_bytes),
              [&](const StridedBox& slab, int64_t source_offset, int64_t target_offset) {
                unsigned char* written = target_bytes + target_offset * to_bytes;
                Copy(written, source_bytes + source_offset * from_bytes, slab, from, to);
                AddBox(sum, written, NormalTarget(slab), to);
              });
  return sum.End();
}

BothSums CopyAndSumBoth(void* target, const void* source, const void* seen, const StridedBox& box,
                        Element from, Element to) {
  const StridedBox normal = Normalize(box);
  const int64_t run = LongRun(normal, from, to);
  if (run == 0) {
    return {SumSource(seen, box, from, to), CopyAndSumTarget(target, source, box, from, to)};
  }
  auto* target_bytes = static_cast<unsigned char*>(target);
  auto* source_bytes = static_cast<const unsigned char*>(source);
  auto* seen_bytes = static_cast<const unsigned char*>(seen);
  Sum seen_sum;
  Sum sum;
  ForEachRun(normal, to, [&](int64_t source_offset, int64_t target_offset) {
    sum.SeeCopyAndAdd(seen_sum, seen_bytes + source_offset, target_bytes + target_offset,
                      source_bytes + source_offset, run);
  });
  internal::Simd().stream_end();
  return {seen_sum.End(), sum.End()};
}

}  // namespace weightwire::kernels
