#include "server/transfer/make.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace weightwire::transfer {
namespace {

template <typename Word>
void Scatter(std::byte* to, const std::byte* from, int64_t count, int64_t stride) {
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * stride * static_cast<int64_t>(sizeof(Word)),
                from + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
  }
}

// `count` elements of `bytes` each, a stride apart.
void Scatter(std::byte* to, const std::byte* from, int64_t count, int64_t stride, int bytes) {
  if (bytes == 1) return Scatter<uint8_t>(to, from, count, stride);
  if (bytes == 2) return Scatter<uint16_t>(to, from, count, stride);
  Scatter<uint32_t>(to, from, count, stride);
}

// Row by row, in host memory (ValidateSlice): the kernel takes rows that lie together.
void QuantizeFourBits(std::byte* made, const int64_t* stride, const std::byte* source,
                      const SegmentCopy& copy) {
  const kernels::QuantizeBox& matrix = copy.matrix;
  const bool codes = copy.transform == plan::Transform::kCodes;
  const int item = kernels::ElementBytes(copy.from);
  const int made_bytes = kernels::ElementBytes(copy.to);
  const int64_t made_count = copy.box.extent[1];
  std::vector<std::byte> row(static_cast<size_t>(matrix.columns * item));
  std::vector<std::byte> code_row(static_cast<size_t>(matrix.columns / 2));
  std::vector<std::byte> scale_row(
      static_cast<size_t>(matrix.columns / matrix.block_columns *
                          kernels::FourBitScaleBytes(*copy.four_bits, copy.from)));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    const std::byte* from = source + r * matrix.source_stride[0] * item;
    if (matrix.source_stride[1] != 1) {
      kernels::StridedBox gather{1, {matrix.columns}, {matrix.source_stride[1]}, {1}};
      kernels::Copy(row.data(), from, gather, copy.from, copy.from);
      from = row.data();
    }
    kernels::QuantizeFourBit(code_row.data(), scale_row.data(), from, 1, matrix.columns,
                             matrix.block_columns, copy.from, *copy.four_bits);
    Scatter(made + r * stride[0] * made_bytes, codes ? code_row.data() : scale_row.data(),
            made_count, stride[1], made_bytes);
  }
}

// `stride` is of what is made, along `copy.box`.
Status Quantize(device::Bytes made, const int64_t* stride, device::ConstBytes source,
                const SegmentCopy& copy) {
  if (copy.four_bits) {
    QuantizeFourBits(made.at, stride, source.at, copy);
    return OkStatus();
  }
  kernels::QuantizeBox matrix = copy.matrix;
  const bool codes = copy.transform == plan::Transform::kCodes;
  std::copy_n(stride, 2, codes ? matrix.target_stride : matrix.scale_stride);
  return codes ? device::QuantizeCodes(made, source, matrix, copy.from)
               : device::QuantizeScales(made, source, matrix, copy.from);
}

size_t MadeBytes(const SegmentCopy& copy) {
  return static_cast<size_t>(copy.box.extent[0] * copy.box.extent[1] *
                             kernels::ElementBytes(copy.to));
}

}  // namespace

Result<uint64_t> SumMade(device::ConstBytes source, const SegmentCopy& copy) {
  if (copy.transform == plan::Transform::kElements) {
    return device::SumSource(source, copy.box, copy.from, copy.to);
  }
  const std::unique_ptr<std::byte[]> packed(new std::byte[MadeBytes(copy)]);
  return MakePacked({packed.get()}, source, copy);
}

Result<uint64_t> MakePacked(device::Bytes packed, device::ConstBytes source,
                            const SegmentCopy& copy) {
  const kernels::StridedBox box = WithPackedTarget(copy.box);
  if (copy.transform == plan::Transform::kElements) {
    const auto sum = device::SumSource(source, copy.box, copy.from, copy.to);
    if (sum) WW_FAIL_IF_ERROR(device::Copy(packed, source, box, copy.from, copy.to));
    return sum;
  }
  WW_FAIL_IF_ERROR(Quantize(packed, box.target_stride, source, copy));
  return device::SumTarget(packed, box, copy.to);
}

Result<uint64_t> MakeInPlace(device::Bytes target, device::ConstBytes source,
                             const SegmentCopy& copy) {
  if (copy.transform == plan::Transform::kElements) {
    return device::CopyAndSumTarget(target, source, copy.box, copy.from, copy.to);
  }
  WW_FAIL_IF_ERROR(Quantize(target, copy.box.target_stride, source, copy));
  return device::SumTarget(target, copy.box, copy.to);
}

Status MakeSlotWithin(const plan::Stream& made, const plan::StreamSchedule& schedule, uint32_t slot,
                      const Binding& binding, const std::atomic<bool>& stop) {
  const plan::SlotSpan& span = schedule.slots[slot];
  for (uint32_t i = span.first_segment; i < span.first_segment + span.segment_count; ++i) {
    if (stop.load(std::memory_order_relaxed)) return OkStatus();
    const plan::CopyOp& op = made.ops[schedule.segments[i].op_index];
    const SegmentCopy copy = CopyOf(op, schedule.segments[i]);
    WW_RETURN_IF_ERROR(Quantize(binding[op.target_tensor].at() + copy.target_offset,
                                copy.box.target_stride,
                                binding[op.source_tensor].at() + copy.source_offset, copy));
  }
  return OkStatus();
}

}  // namespace weightwire::transfer
