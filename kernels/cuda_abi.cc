// The C interface over the launches: arguments are checked before a device is looked for.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "kernels/cuda_call.h"
#include "kernels/cuda_launch.h"

namespace weightwire::kernels::internal {
namespace {

bool ElementKnown(int32_t element) { return element >= WW_OPAQUE1 && element <= WW_F32; }

bool Aligned(const void* pointer, int bytes) {
  return pointer != nullptr &&
         reinterpret_cast<uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0;
}

bool BoxSound(const ww_cuda_box& box) {
  if (box.ndim < 0 || box.ndim > kMaxDims) return false;
  for (int d = 0; d < box.ndim; ++d) {
    if (box.extent[d] < 1 || box.source_stride[d] < 0 || box.target_stride[d] < 0) return false;
  }
  return true;
}

StridedBox ToBox(const ww_cuda_box& given) {
  StridedBox box;
  box.ndim = given.ndim;
  std::copy(given.extent, given.extent + given.ndim, box.extent);
  std::copy(given.source_stride, given.source_stride + given.ndim, box.source_stride);
  std::copy(given.target_stride, given.target_stride + given.ndim, box.target_stride);
  return box;
}

/// What is wrong with a job, or null.
template <class Job>
const char* WrongInBox(const Job& job) {
  if (!ElementKnown(job.from) || !ElementKnown(job.to)) return "an element kind is unknown";
  if (!CastKnown(static_cast<Element>(job.from), static_cast<Element>(job.to))) {
    return "no cast between these element kinds is known";
  }
  if (!BoxSound(job.box)) return "the box needs ndim 0 to 8, extents from 1 and strides from 0";
  if (!Aligned(job.source, ElementBytes(static_cast<Element>(job.from)))) {
    return "the source is null or not aligned to its elements";
  }
  return nullptr;
}

const char* Wrong(const ww_cuda_copy_job& job) {
  if (const char* wrong = WrongInBox(job)) return wrong;
  bool aligned = Aligned(job.target, ElementBytes(static_cast<Element>(job.to)));
  return aligned ? nullptr : "the target is null or not aligned to its elements";
}

const char* Wrong(const ww_cuda_sum_job& job) {
  if (const char* wrong = WrongInBox(job)) return wrong;
  return Aligned(job.sum, 8) ? nullptr : "the sum is null or not aligned to 8 bytes";
}

const char* Wrong(const ww_cuda_quantize_job& job) {
  if (job.from < WW_BF16 || job.from > WW_F32) return "only bf16, fp16 and fp32 can be quantized";
  if (std::min({job.rows, job.columns, job.block_rows, job.block_columns}) < 1) {
    return "the matrix and its blocks need extents from 1";
  }
  for (const int64_t* stride : {job.source_stride, job.target_stride, job.scale_stride}) {
    if (std::min(stride[0], stride[1]) < 0) return "strides must be from 0";
  }
  if (job.codes == nullptr && job.scale_inv == nullptr) return "codes and scales are null";
  if (job.scale < 0 || job.scale > static_cast<int32_t>(kLastScaleKind)) return "no such scales";
  const int scale_bytes =
      ScaleBytes(static_cast<ScaleKind>(job.scale), static_cast<Element>(job.from));
  bool aligned = (job.scale_inv == nullptr || Aligned(job.scale_inv, scale_bytes)) &&
                 Aligned(job.source, ElementBytes(static_cast<Element>(job.from)));
  return aligned ? nullptr : "a pointer is null or not aligned to its elements";
}

const char* Wrong(const ww_cuda_four_bit_job& job) {
  if (job.from < WW_BF16 || job.from > WW_F32) return "only bf16, fp16 and fp32 can be quantized";
  if (job.kind < 0 || job.kind > static_cast<int32_t>(kLastFourBitKind)) {
    return "no such kind of four bits";
  }
  if (job.group < 8 || job.group > 256 || job.group % 8 != 0) {
    return "groups must be of 8 to 256 elements, a multiple of 8";
  }
  if (job.rows < 1 || job.columns < 1 || job.columns % job.group != 0) {
    return "the matrix needs extents from 1, and whole groups";
  }
  if (job.rows > INT64_MAX / job.columns) return "the matrix is larger than any memory";
  for (const int64_t* stride : {job.source_stride, job.code_stride, job.scale_stride}) {
    if (std::min(stride[0], stride[1]) < 0) return "strides must be from 0";
  }
  if (job.codes == nullptr && job.scales == nullptr) return "codes and scales are null";
  if (job.code_bytes != 1 && job.code_bytes != 4) return "codes must lie in units of 1 or 4 bytes";
  const auto kind = static_cast<FourBitKind>(job.kind);
  const bool below_zero = kind == FourBitKind::kNvFp4 ? job.global <= 0 : job.global < 0;
  if (IsNvFp4(kind) && (below_zero || std::isinf(job.global))) {
    return "the global scale must be a number above 0 (of modelopt's NVFP4 or 0), or NaN";
  }
  const auto from = static_cast<Element>(job.from);
  bool aligned = (job.codes == nullptr || Aligned(job.codes, job.code_bytes)) &&
                 (job.scales == nullptr || Aligned(job.scales, FourBitScaleBytes(kind, from))) &&
                 Aligned(job.source, ElementBytes(from));
  return aligned ? nullptr : "a pointer is null or not aligned to its elements";
}

bool OrderKnown(int32_t order) { return order >= 0 && order < kDeltaOrders; }

DeltaOrder AsOrder(int32_t order) { return static_cast<DeltaOrder>(order); }
int OrderBytes(int32_t order) { return DeltaElementBytes(AsOrder(order)); }

/// More elements have no memory, and 2^31 chunks no launch.
constexpr int64_t kDeltaElementsMax = int64_t{1} << 38;

/// The most that a scan writes and an apply reads has room in the scratch memory.
const char* Wrong(const ww_cuda_delta_scan_job& job) {
  if (!OrderKnown(job.order)) return "the order is unknown";
  if (job.elements < 0 || job.elements > kDeltaElementsMax || job.changes_max < 0) {
    return "elements and changes must be from 0, elements at most 2^38";
  }
  const int bytes = OrderBytes(job.order);
  if (!Aligned(job.base, bytes) || !Aligned(job.now, bytes) || !Aligned(job.escapes, bytes) ||
      (job.copy != nullptr && !Aligned(job.copy, bytes))) {
    return "an array is null or not aligned to its elements";
  }
  if (job.gaps == nullptr || job.steps == nullptr) return "a stream is null";
  bool aligned = Aligned(job.counts, 8) && Aligned(job.scratch, 8);
  return aligned ? nullptr : "counts or scratch memory are null or not aligned to 8 bytes";
}

const char* Wrong(const ww_cuda_delta_apply_job& job) {
  if (!OrderKnown(job.order)) return "the order is unknown";
  if (job.elements < 0 || job.elements > kDeltaElementsMax) {
    return "elements must be from 0, at most 2^38";
  }
  const ww_cuda_delta_counts& counts = job.counts;
  if (counts.changes < 0 || counts.changes > job.elements || counts.escapes < 0 ||
      counts.escapes > counts.changes || counts.gap_bytes < 0 ||
      counts.gap_bytes > GapBytesMost(job.elements, counts.changes)) {
    return "the streams are longer than the array's can be";
  }
  const int bytes = OrderBytes(job.order);
  if (!Aligned(job.target, bytes) || !Aligned(job.escapes, bytes)) {
    return "an array is null or not aligned to its elements";
  }
  if (job.gaps == nullptr || job.steps == nullptr) return "a stream is null";
  bool aligned = Aligned(job.applied, 4) && Aligned(job.scratch, 8);
  return aligned ? nullptr : "applied or scratch memory are null or not aligned";
}

template <class Job>
int32_t CheckJobs(const Job* jobs, size_t count, const char* what) {
  for (size_t i = 0; i < count; ++i) {
    const char* wrong = Wrong(jobs[i]);
    if (wrong == nullptr) continue;
    char why[256];
    std::snprintf(why, sizeof why, "job %zu of %zu: %s", i, count, wrong);
    return Fail(WW_CUDA_INVALID, what, why);
  }
  return WW_CUDA_OK;
}

DeviceCopy ToDevice(const ww_cuda_copy_job& job) {
  return MakeDeviceCopy(job.target, job.source, ToBox(job.box), static_cast<Element>(job.from),
                        static_cast<Element>(job.to));
}

DeviceSum ToDevice(const ww_cuda_sum_job& job) {
  return MakeDeviceSum(job.sum, job.source, ToBox(job.box), static_cast<Element>(job.from),
                       static_cast<Element>(job.to));
}

DeviceQuantize ToDevice(const ww_cuda_quantize_job& job) {
  return {static_cast<unsigned char*>(job.codes),
          job.scale_inv,
          static_cast<const unsigned char*>(job.source),
          {job.rows,
           job.columns,
           std::min(job.block_rows, job.rows),
           std::min(job.block_columns, job.columns),
           {job.source_stride[0], job.source_stride[1]},
           {job.target_stride[0], job.target_stride[1]},
           {job.scale_stride[0], job.scale_stride[1]},
           static_cast<ScaleKind>(job.scale)},
          static_cast<Element>(job.from)};
}

DeviceDeltaScan ToDevice(const ww_cuda_delta_scan_job& job) {
  return {static_cast<const unsigned char*>(job.base),
          static_cast<const unsigned char*>(job.now),
          static_cast<unsigned char*>(job.copy),
          job.elements,
          job.changes_max,
          job.gaps,
          job.steps,
          job.escapes};
}

DeviceDeltaApply ToDevice(const ww_cuda_delta_apply_job& job) {
  return {static_cast<unsigned char*>(job.target),
          job.elements,
          job.gaps,
          job.steps,
          job.escapes,
          job.counts.gap_bytes,
          job.counts.changes,
          job.counts.escapes};
}

/// `launch` of each job, until one fails.
template <class Job, class Launch>
cudaError_t OneByOne(const Job* jobs, size_t count, Launch launch) {
  for (size_t i = 0; i < count; ++i) {
    const cudaError_t error = launch(jobs[i]);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// Launches the jobs in batches; `Batch` holds `jobs_max` of them.
template <class Batch, class Job, class Launch>
cudaError_t InBatches(Batch& batch, int jobs_max, const Job* jobs, size_t count, Launch launch) {
  for (size_t first = 0; first < count; first += static_cast<size_t>(jobs_max)) {
    auto here = static_cast<int>(std::min(count - first, static_cast<size_t>(jobs_max)));
    for (int i = 0; i < here; ++i) batch.jobs[i] = ToDevice(jobs[first + static_cast<size_t>(i)]);
    cudaError_t error = launch(batch, here);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace weightwire::kernels::internal

using namespace weightwire::kernels::internal;  // NOLINT: the interface itself has no namespace

int32_t ww_cuda_copy(int32_t device, ww_cuda_stream stream, const ww_cuda_copy_job* jobs,
                     size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_copy")) return bad;
  CopyBatch batch;
  return OnDevice(device, "ww_cuda_copy", [&] {
    return InBatches(batch, kCopiesPerLaunch, jobs, count, [&](const CopyBatch& full, int here) {
      return LaunchCopies(full, here, AsStream(stream));
    });
  });
}

int32_t ww_cuda_sum(int32_t device, ww_cuda_stream stream, const ww_cuda_sum_job* jobs,
                    size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_sum")) return bad;
  SumBatch batch;
  static_assert(sizeof batch.secret == sizeof XXH3_kSecret);
  std::memcpy(&batch.secret, XXH3_kSecret, sizeof batch.secret);
  return OnDevice(device, "ww_cuda_sum", [&] {
    return InBatches(batch, kSumsPerLaunch, jobs, count, [&](const SumBatch& full, int here) {
      return LaunchSums(full, here, AsStream(stream));
    });
  });
}

int32_t ww_cuda_quantize(int32_t device, ww_cuda_stream stream, const ww_cuda_quantize_job* jobs,
                         size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_quantize")) return bad;
  return OnDevice(device, "ww_cuda_quantize", [&] {
    return OneByOne(jobs, count, [&](const ww_cuda_quantize_job& job) {
      return LaunchQuantize(ToDevice(job), AsStream(stream));
    });
  });
}

int32_t ww_cuda_quantize_four_bit(int32_t device, ww_cuda_stream stream,
                                  const ww_cuda_four_bit_job* jobs, size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_quantize_four_bit")) return bad;
  return OnDevice(device, "ww_cuda_quantize_four_bit", [&] {
    return OneByOne(jobs, count, [&](const ww_cuda_four_bit_job& job) {
      return LaunchFourBit(MakeDeviceFourBit(job), AsStream(stream));
    });
  });
}

int64_t ww_cuda_delta_scratch_bytes(int32_t order, int64_t elements) {
  if (!OrderKnown(order) || elements < 0 || elements > kDeltaElementsMax) return 0;
  return DeltaScratchBytes(elements, OrderBytes(order));
}

int32_t ww_cuda_delta_scan(int32_t device, ww_cuda_stream stream,
                           const ww_cuda_delta_scan_job* jobs, size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_delta_scan")) return bad;
  static_assert(sizeof(DeltaCounts) == sizeof(ww_cuda_delta_counts));
  return OnDevice(device, "ww_cuda_delta_scan", [&] {
    return OneByOne(jobs, count, [&](const ww_cuda_delta_scan_job& job) {
      return LaunchDeltaScan(AsOrder(job.order), ToDevice(job),
                             reinterpret_cast<DeltaCounts*>(job.counts), job.scratch,
                             AsStream(stream));
    });
  });
}

int32_t ww_cuda_delta_apply(int32_t device, ww_cuda_stream stream,
                            const ww_cuda_delta_apply_job* jobs, size_t count) {
  if (int32_t bad = CheckJobs(jobs, count, "ww_cuda_delta_apply")) return bad;
  return OnDevice(device, "ww_cuda_delta_apply", [&] {
    return OneByOne(jobs, count, [&](const ww_cuda_delta_apply_job& job) {
      return LaunchDeltaApply(AsOrder(job.order), ToDevice(job), job.applied, job.scratch,
                              AsStream(stream));
    });
  });
}
