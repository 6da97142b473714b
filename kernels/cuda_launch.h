#pragma once

#include <cuda_runtime_api.h>

#include "kernels/device.h"
#include "kernels/device_delta.h"

/// Internal to kernels/: the launches of cuda_kernels.cu. They only enqueue; the calling thread's
/// device is the stream's.
namespace weightwire::kernels::internal {

/// Jobs go by value in the 4 KiB of a kernel's arguments.
constexpr int kCopiesPerLaunch = 14;
constexpr int kSumsPerLaunch = 14;

struct CopyBatch {
  DeviceCopy jobs[kCopiesPerLaunch];
};
struct SumBatch {
  DeviceSum jobs[kSumsPerLaunch];
  SumSecret secret;
};

cudaError_t LaunchCopies(const CopyBatch& batch, int count, cudaStream_t stream);
cudaError_t LaunchSums(const SumBatch& batch, int count, cudaStream_t stream);
cudaError_t LaunchQuantize(const DeviceQuantize& job, cudaStream_t stream);
cudaError_t LaunchFourBit(const DeviceFourBit& job, cudaStream_t stream);
/// `scratch`: DeltaScratchBytes, aligned to 8 bytes.
cudaError_t LaunchDeltaScan(DeltaOrder order, const DeviceDeltaScan& job, DeltaCounts* counts,
                            void* scratch, cudaStream_t stream);
cudaError_t LaunchDeltaApply(DeltaOrder order, const DeviceDeltaApply& job, uint32_t* applied,
                             void* scratch, cudaStream_t stream);

}  // namespace weightwire::kernels::internal
