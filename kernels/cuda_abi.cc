// The C interface over the launches: arguments are checked before a device is looked for.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
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
    for (size_t i = 0; i < count; ++i) {
      cudaError_t error = LaunchQuantize(ToDevice(jobs[i]), AsStream(stream));
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}
