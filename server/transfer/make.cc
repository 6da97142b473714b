#include "server/transfer/make.h"

#include <algorithm>
#include <memory>

namespace weightwire::transfer {
namespace {

// `stride` is of what is made, along `copy.box`.
Status Quantize(device::Bytes made, const int64_t* stride, device::ConstBytes source,
                const SegmentCopy& copy) {
  kernels::QuantizeBox matrix = copy.matrix;
  const bool codes = copy.transform == plan::Transform::kCodes;
  std::copy_n(stride, 2, codes ? matrix.target_stride : matrix.scale_stride);
  if (copy.four_bits) {
    return codes ? device::QuantizeFourBitCodes(made, source, matrix, copy.from, *copy.four_bits,
                                                kernels::ElementBytes(copy.to))
                 : device::QuantizeFourBitScales(made, source, matrix, copy.from, *copy.four_bits);
  }
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
