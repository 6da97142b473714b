#include "server/transfer/make.h"

#include <algorithm>
#include <memory>

namespace weightwire::transfer {
namespace {

// `stride` is of what is made, along `copy.box`.
void QuantizeOnHost(std::byte* made, const int64_t* stride, const std::byte* source,
                    const kernels::QuantizeBox& matrix, const SegmentCopy& copy) {
  kernels::QuantizeBox box = matrix;
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

// Nothing is quantized on a GPU yet: its elements come to the host, packed.
Status Quantize(std::byte* made, const int64_t* stride, device::ConstBytes source,
                const SegmentCopy& copy) {
  kernels::QuantizeBox matrix = copy.matrix;
  if (source.device == nullptr) {
    QuantizeOnHost(made, stride, source.at, matrix, copy);
    return OkStatus();
  }
  kernels::StridedBox box;
  box.ndim = 2;
  box.extent[0] = matrix.rows;
  box.extent[1] = matrix.columns;
  std::copy_n(matrix.source_stride, 2, box.source_stride);
  box = WithPackedTarget(box);
  std::copy_n(box.target_stride, 2, matrix.source_stride);
  const auto bytes =
      static_cast<size_t>(matrix.rows * matrix.columns * kernels::ElementBytes(copy.from));
  const std::unique_ptr<std::byte[]> here(new std::byte[bytes]);
  WW_RETURN_IF_ERROR(device::Copy({here.get()}, source, box, copy.from, copy.from));
  QuantizeOnHost(made, stride, here.get(), matrix, copy);
  return OkStatus();
}

size_t MadeBytes(const SegmentCopy& copy) {
  return static_cast<size_t>(copy.box.extent[0] * copy.box.extent[1] *
                             kernels::ElementBytes(copy.to));
}

}  // namespace

Result<uint64_t> SumMade(device::ConstBytes source, const SegmentCopy& copy) {
  if (copy.makes == plan::Makes::kElements) {
    return device::SumSource(source, copy.box, copy.from, copy.to);
  }
  const std::unique_ptr<std::byte[]> packed(new std::byte[MadeBytes(copy)]);
  return MakePacked({packed.get()}, source, copy);
}

Result<uint64_t> MakePacked(device::Bytes packed, device::ConstBytes source,
                            const SegmentCopy& copy) {
  const kernels::StridedBox box = WithPackedTarget(copy.box);
  if (copy.makes == plan::Makes::kElements) {
    const auto sum = device::SumSource(source, copy.box, copy.from, copy.to);
    if (sum) WW_FAIL_IF_ERROR(device::Copy(packed, source, box, copy.from, copy.to));
    return sum;
  }
  const size_t bytes = MadeBytes(copy);
  std::unique_ptr<std::byte[]> here;
  if (packed.device != nullptr) here.reset(new std::byte[bytes]);
  std::byte* made = here ? here.get() : packed.at;
  WW_FAIL_IF_ERROR(Quantize(made, box.target_stride, source, copy));
  if (here) WW_FAIL_IF_ERROR(device::CopyRun(packed, here.get(), bytes));
  return kernels::SumContiguous(made, bytes);
}

Result<uint64_t> MakeInPlace(device::Bytes target, device::ConstBytes source,
                             const SegmentCopy& copy) {
  if (copy.makes == plan::Makes::kElements) {
    return device::CopyAndSumTarget(target, source, copy.box, copy.from, copy.to);
  }
  if (target.device == nullptr) {
    WW_FAIL_IF_ERROR(Quantize(target.at, copy.box.target_stride, source, copy));
    return kernels::SumTarget(target.at, copy.box, copy.to);
  }
  const std::unique_ptr<std::byte[]> packed(new std::byte[MadeBytes(copy)]);
  WW_FAIL_IF_ERROR(Quantize(packed.get(), WithPackedTarget(copy.box).target_stride, source, copy));
  return device::CopyAndSumTarget(target, packed.get(), WithPackedSource(copy.box), copy.to,
                                  copy.to);
}

}  // namespace weightwire::transfer
