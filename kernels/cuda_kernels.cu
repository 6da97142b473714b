// Launches, shuffles and shared memory around the functions of kernels/device.h.
// Untested on hardware: block sizes and unit widths are first guesses.
#include <algorithm>

#include "kernels/cuda_launch.h"

namespace weightwire::kernels::internal {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int64_t kCopyBlocksMax = 4096;
constexpr int64_t kQuantizeBlocksMax = 1 << 20;

static_assert(sizeof(CopyBatch) <= 4096 && sizeof(SumBatch) <= 4096, "arguments of a kernel");

/// One row of the grid per job.
__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ CopyBatch batch) {
  const DeviceCopy& job = batch.jobs[blockIdx.y];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < job.box.count;
       i += step) {
    CopyAt(job, i);
  }
}

/// One warp per job: thread t works on lane t % 8 as group t / 8 of 4.
__global__ void __launch_bounds__(kWarp) SumKernel(const __grid_constant__ SumBatch batch) {
  __shared__ SumSecret secret;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 24) secret.words[thread] = batch.secret.words[thread];
  __syncwarp();
  const DeviceSum& job = batch.jobs[blockIdx.x];
  const PackedBytes bytes(job);
  if (bytes.size <= kShortSumBytes) {
    if (thread == 0) *job.sum = SumShort(bytes, secret);
    return;
  }
  const int groups = kWarp / kSumLanes;
  auto total = [&](auto part) {
    uint64_t sum = part(thread / kSumLanes);
    for (int other = kSumLanes; other < kWarp; other *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, other);
    }
    return sum;
  };
  const uint64_t mine = LaneOfSum(bytes, secret, thread % kSumLanes, groups, total);
  uint64_t lanes[kSumLanes];
  for (int i = 0; i < kSumLanes; ++i) lanes[i] = __shfl_sync(kAllLanes, mine, i);
  if (thread == 0) *job.sum = MergedLanes(lanes, bytes.size, secret);
}

__device__ uint32_t MaximumOfBlock(uint32_t value) {
  __shared__ uint32_t of_warps[kThreads / kWarp];
  for (int other = kWarp / 2; other > 0; other /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, other));
  }
  __syncthreads();  // of_warps may still be read for the block before
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  for (uint32_t warp : of_warps) value = max(value, warp);
  return value;
}

/// One thread block per block of the matrix.
__global__ void __launch_bounds__(kThreads)
    QuantizeKernel(const __grid_constant__ DeviceQuantize job) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t blocks = BlockCount(job.box);
  for (int64_t index = blockIdx.x; index < blocks; index += gridDim.x) {
    const DeviceBlock block = BlockAt(job, index);
    const uint32_t amax = MaximumOfBlock(AmaxOfThread(job, block, thread, kThreads));
    QuantizeOfThread(job, block, amax, thread, kThreads);
  }
}

/// Some threads of a warp per group, several groups in a block.
__global__ void __launch_bounds__(kThreads)
    FourBitKernel(const __grid_constant__ DeviceFourBit job) {
  const int shared = ThreadsOfGroup(job.group);
  const int64_t groups = job.rows * job.across;
  const int64_t here = kThreads / shared;
  const int64_t step = gridDim.x * here;
  // All threads of a warp go on, or none: shuffles are of whole warps.
  for (int64_t first = blockIdx.x * here; first < groups; first += step) {
    const FourBitUnit unit = FourBitUnitOf(job, first, static_cast<int>(threadIdx.x));
    uint32_t amax = AmaxOfUnit(unit);
    for (int other = shared / 2; other > 0; other /= 2) {
      amax = max(amax, __shfl_xor_sync(kAllLanes, amax, other));
    }
    QuantizeUnit(job, unit, amax);
  }
}

}  // namespace

cudaError_t LaunchCopies(const CopyBatch& batch, int count, cudaStream_t stream) {
  int64_t indices = 1;
  for (int i = 0; i < count; ++i) indices = std::max(indices, batch.jobs[i].box.count);
  const int64_t blocks = std::min(kCopyBlocksMax, (indices - 1) / kThreads + 1);
  CopyKernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)), kThreads, 0,
               stream>>>(batch);
  return cudaGetLastError();
}

cudaError_t LaunchSums(const SumBatch& batch, int count, cudaStream_t stream) {
  SumKernel<<<static_cast<unsigned>(count), kWarp, 0, stream>>>(batch);
  return cudaGetLastError();
}

cudaError_t LaunchQuantize(const DeviceQuantize& job, cudaStream_t stream) {
  const int64_t blocks = std::min(kQuantizeBlocksMax, BlockCount(job.box));
  QuantizeKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

cudaError_t LaunchFourBit(const DeviceFourBit& job, cudaStream_t stream) {
  const int64_t here = kThreads / ThreadsOfGroup(job.group);
  const int64_t blocks = std::min(kQuantizeBlocksMax, (job.rows * job.across - 1) / here + 1);
  FourBitKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace weightwire::kernels::internal
