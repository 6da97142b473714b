// The host's half of kernels/device.h: boxes are normalised and a copy's unit chosen before a
// launch.
#include <algorithm>

#include "kernels/device.h"
#include "kernels/strided.h"

namespace weightwire::kernels::internal {
namespace {

DeviceBox ToBytes(const StridedBox& box, int64_t source_bytes, int64_t target_bytes) {
  DeviceBox bytes{};
  bytes.count = ElementsFrom(box, 0);
  bytes.ndim = box.ndim;
  for (int d = 0; d < box.ndim; ++d) {
    bytes.extent[d] = box.extent[d];
    bytes.source_step[d] = box.source_stride[d] * source_bytes;
    bytes.target_step[d] = box.target_stride[d] * target_bytes;
  }
  return bytes;
}

/// Every place that a unit begins at, and the run that units must fill, in one number: what divides
/// it divides them all.
uint64_t CommonAlignment(const DeviceCopy& job, int64_t run_bytes) {
  uint64_t all = reinterpret_cast<uintptr_t>(job.target) | reinterpret_cast<uintptr_t>(job.source) |
                 static_cast<uint64_t>(run_bytes);
  for (int d = 0; d + 1 < job.box.ndim; ++d) {
    all |= static_cast<uint64_t>(job.box.source_step[d] | job.box.target_step[d]);
  }
  return all;
}

void Widen(DeviceCopy& job, int element_bytes) {
  job.unit = element_bytes;
  const int last = job.box.ndim - 1;
  if (last < 0 || job.box.source_step[last] != element_bytes ||
      job.box.target_step[last] != element_bytes) {
    return;
  }
  const int64_t run = job.box.extent[last] * element_bytes;
  const uint64_t alignment = CommonAlignment(job, run);
  while (job.unit < 16 && alignment % (2 * static_cast<uint64_t>(job.unit)) == 0) job.unit *= 2;
  job.box.count = job.box.count / job.box.extent[last] * (run / job.unit);
  job.box.extent[last] = run / job.unit;
  job.box.source_step[last] = job.box.target_step[last] = job.unit;
}

}  // namespace

DeviceCopy MakeDeviceCopy(void* target, const void* source, const StridedBox& box, Element from,
                          Element to) {
  RequireCast(from, to);
  DeviceCopy job{static_cast<unsigned char*>(target),
                 static_cast<const unsigned char*>(source),
                 ToBytes(Normalize(box), ElementBytes(from), ElementBytes(to)),
                 0,
                 from,
                 to};
  if (KeepsBits(from, to)) Widen(job, ElementBytes(from));
  return job;
}

DeviceSum MakeDeviceSum(uint64_t* sum, const void* source, const StridedBox& box, Element from,
                        Element to) {
  RequireCast(from, to);
  StridedBox one_side = box;
  std::copy(box.source_stride, box.source_stride + box.ndim, one_side.target_stride);
  return {static_cast<const unsigned char*>(source),
          sum,
          ToBytes(Normalize(one_side), ElementBytes(from), ElementBytes(to)),
          from,
          to,
          KeepsBits(from, to)};
}

DeviceFourBit MakeDeviceFourBit(const ww_cuda_four_bit_job& job) {
  const auto kind = static_cast<FourBitKind>(job.kind);
  return {static_cast<unsigned char*>(job.codes),
          static_cast<unsigned char*>(job.scales),
          static_cast<const unsigned char*>(job.source),
          job.rows,
          job.columns / job.group,
          job.group,
          {job.source_stride[0], job.source_stride[1]},
          {job.code_stride[0], job.code_stride[1]},
          {job.scale_stride[0], job.scale_stride[1]},
          job.code_bytes,
          static_cast<Element>(job.from),
          kind,
          IsNvFp4(kind) ? job.global : 1.0f};
}

}  // namespace weightwire::kernels::internal
