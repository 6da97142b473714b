// The C interface over the launches: arguments are checked, the device is set and restored, and an
// error leaves its words for the thread that made it.
#define XXH_INLINE_ALL
#include <cuda_runtime_api.h>
#include <xxhash.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/cuda.h"
#include "kernels/cuda_launch.h"

namespace weightwire::kernels::internal {
namespace {

thread_local char last_error[512] = "";

int32_t Fail(int32_t code, const char* what, const char* why) {
  std::snprintf(last_error, sizeof last_error, "%s: %s", what, why);
  return code;
}

int32_t Checked(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return WW_CUDA_OK;
  cudaGetLastError();  // the next call must not report it again
  switch (error) {
    case cudaErrorInsufficientDriver:
      return Fail(WW_CUDA_NO_DEVICE, what,
                  "no device: this host has no CUDA driver, or one older than the library");
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
      break;
    default:
      return Fail(WW_CUDA_FAILED, what, cudaGetErrorString(error));
  }
  char why[256];
  std::snprintf(why, sizeof why, "no device: %s", cudaGetErrorString(error));
  return Fail(WW_CUDA_NO_DEVICE, what, why);
}

/// Makes `device` the thread's, and gives the thread its own back.
class DeviceScope {
 public:
  DeviceScope(int32_t device, const char* what) {
    status_ = Checked(cudaGetDevice(&before_), what);
    if (status_ != WW_CUDA_OK || before_ == device) return;
    status_ = Checked(cudaSetDevice(device), what);
    restore_ = status_ == WW_CUDA_OK;
  }
  ~DeviceScope() {
    if (restore_) cudaSetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  int32_t status() const { return status_; }

 private:
  int before_ = 0;
  int32_t status_ = WW_CUDA_OK;
  bool restore_ = false;
};

template <class Work>
int32_t OnDevice(int32_t device, const char* what, Work work) {
  DeviceScope scope(device, what);
  return scope.status() != WW_CUDA_OK ? scope.status() : Checked(work(), what);
}

cudaStream_t AsStream(ww_cuda_stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t AsEvent(ww_cuda_event event) { return static_cast<cudaEvent_t>(event); }

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
  bool aligned = Aligned(job.codes, 1) && Aligned(job.scale_inv, 4) &&
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
          reinterpret_cast<uint32_t*>(job.scale_inv),
          static_cast<const unsigned char*>(job.source),
          {job.rows,
           job.columns,
           std::min(job.block_rows, job.rows),
           std::min(job.block_columns, job.columns),
           {job.source_stride[0], job.source_stride[1]},
           {job.target_stride[0], job.target_stride[1]},
           {job.scale_stride[0], job.scale_stride[1]}},
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

uint32_t ww_cuda_abi_version(void) { return WW_CUDA_ABI_VERSION; }

const char* ww_cuda_error(void) { return last_error; }

int32_t ww_cuda_device_count(int32_t* count) {
  *count = 0;
  return Checked(cudaGetDeviceCount(count), "ww_cuda_device_count");
}

int32_t ww_cuda_stream_create(int32_t device, ww_cuda_stream* stream) {
  return OnDevice(device, "ww_cuda_stream_create", [&] {
    return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream),
                                     cudaStreamNonBlocking);
  });
}

int32_t ww_cuda_stream_destroy(int32_t device, ww_cuda_stream stream) {
  return OnDevice(device, "ww_cuda_stream_destroy",
                  [&] { return cudaStreamDestroy(AsStream(stream)); });
}

int32_t ww_cuda_event_create(int32_t device, ww_cuda_event* event) {
  return OnDevice(device, "ww_cuda_event_create", [&] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
  });
}

int32_t ww_cuda_event_destroy(int32_t device, ww_cuda_event event) {
  return OnDevice(device, "ww_cuda_event_destroy",
                  [&] { return cudaEventDestroy(AsEvent(event)); });
}

int32_t ww_cuda_event_record(int32_t device, ww_cuda_event event, ww_cuda_stream stream) {
  return OnDevice(device, "ww_cuda_event_record",
                  [&] { return cudaEventRecord(AsEvent(event), AsStream(stream)); });
}

int32_t ww_cuda_event_query(int32_t device, ww_cuda_event event) {
  bool ready = true;
  int32_t status = OnDevice(device, "ww_cuda_event_query", [&] {
    cudaError_t error = cudaEventQuery(AsEvent(event));
    ready = error != cudaErrorNotReady;
    return ready ? error : cudaSuccess;
  });
  return ready ? status : WW_CUDA_NOT_READY;
}

int32_t ww_cuda_stream_wait(int32_t device, ww_cuda_stream stream, ww_cuda_event event) {
  return OnDevice(device, "ww_cuda_stream_wait",
                  [&] { return cudaStreamWaitEvent(AsStream(stream), AsEvent(event), 0); });
}

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
