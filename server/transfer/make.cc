#include "server/transfer/make.h"

#include <memory>

namespace weightwire::transfer {
namespace {

// `stride` is of what is made, along `copy.box`.
void Quantize(std::byte* made, const int64_t* stride, const std::byte* source,
              const SegmentCopy& copy) {
  kernels::QuantizeBox box = copy.matrix;
  if (copy.makes == plan::Makes::kCodes) {
    box.target_stride[0] = stride[0];
    box.target_stride[1] = stride[1];
    return kernels::QuantizeE4M3(made, nullptr, source, box, copy.from);
  }
  box.target_stride[1] = box.source_stride[1];  // of no codes: rows are read where they lie
  box.scale_stride[0] = stride[0];
  box.scale_stride[1] = stride[1];
  kernels::QuantizeE4M3(nullptr, made, source, box, copy.from);
}

size_t MadeBytes(const SegmentCopy& copy) {
  return static_cast<size_t>(copy.box.extent[0] * copy.box.extent[1] *
                             kernels::ElementBytes(copy.to));
}

}  // namespace

uint64_t SumMade(const std::byte* source, const SegmentCopy& copy) {
  if (copy.makes == plan::Makes::kElements) {
    return kernels::SumSource(source, copy.box, copy.from, copy.to);
  }
  const std::unique_ptr<std::byte[]> packed(new std::byte[MadeBytes(copy)]);
  return MakePacked(packed.get(), source, copy);
}

uint64_t MakePacked(std::byte* packed, const std::byte* source, const SegmentCopy& copy) {
  const kernels::StridedBox box = WithPackedTarget(copy.box);
  if (copy.makes == plan::Makes::kElements) {
    const uint64_t sum = kernels::SumSource(source, copy.box, copy.from, copy.to);
    kernels::Copy(packed, source, box, copy.from, copy.to);
    return sum;
  }
  Quantize(packed, box.target_stride, source, copy);
  return kernels::SumContiguous(packed, MadeBytes(copy));
}

uint64_t MakeInPlace(std::byte* target, const std::byte* source, const SegmentCopy& copy) {
  if (copy.makes == plan::Makes::kElements) {
    return kernels::CopyAndSumTarget(target, source, copy.box, copy.from, copy.to);
  }
  Quantize(target, copy.box.target_stride, source, copy);
  return kernels::SumTarget(target, copy.box, copy.to);
}

}  // namespace weightwire::transfer
