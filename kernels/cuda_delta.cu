// Launches and prefixes around the functions of kernels/device_delta.h.
// Untested on hardware: block sizes are first guesses.
#include "kernels/cuda_launch.h"

namespace weightwire::kernels::internal {
namespace {

/// What all threads before this one have, joined; `total` is that of all threads of the block.
template <class Run>
__device__ Run PrefixOfBlock(const Run& mine, Run& total) {
  __shared__ Run runs[kDeltaThreads];
  const int thread = static_cast<int>(threadIdx.x);
  Run upto = mine;
  __syncthreads();  // runs may still be read for the call before
  runs[thread] = upto;
  for (int apart = 1; apart < kDeltaThreads; apart *= 2) {
    __syncthreads();
    const Run before = thread >= apart ? runs[thread - apart] : Run{};
    __syncthreads();
    upto = Joined(before, upto);
    runs[thread] = upto;
  }
  __syncthreads();
  total = runs[kDeltaThreads - 1];
  return thread == 0 ? Run{} : runs[thread - 1];
}

/// In the place of each run what comes before it, and behind the last one all of it. One block.
template <class Run>
__device__ Run PrefixOfAll(Run* runs, int64_t count, Run before) {
  for (int64_t first = 0; first < count; first += kDeltaThreads) {
    const int64_t i = first + threadIdx.x;
    const Run mine = i < count ? runs[i] : Run{};
    Run total;
    const Run here = PrefixOfBlock(mine, total);
    if (i < count) runs[i] = Joined(before, here);
    before = Joined(before, total);
  }
  if (threadIdx.x == 0) runs[count] = before;
  return before;
}

template <class Kind>
__device__ int64_t BeginOfThread() {
  constexpr int kEach = kDeltaRunBytes / static_cast<int>(sizeof(typename Kind::Word));
  return (static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x) * kEach;
}

template <class Kind>
__global__ void __launch_bounds__(kDeltaThreads)
    CountKernel(const __grid_constant__ DeviceDeltaScan job, DeltaRun* runs) {
  const int64_t begin = BeginOfThread<Kind>();
  DeltaRun total;
  PrefixOfBlock(begin < job.elements ? CountRun<Kind>(job, begin) : DeltaRun{}, total);
  if (threadIdx.x == 0) runs[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kDeltaThreads)
    ScanPrefixKernel(DeltaRun* runs, int64_t count, DeltaCounts* counts) {
  const DeltaRun all = PrefixOfAll(runs, count, DeltaStart());
  if (threadIdx.x == 0) *counts = {all.gap_bytes, all.changes, all.escapes};
}

/// The counts again and not kept: to keep them takes as much memory as the array.
template <class Kind>
__global__ void __launch_bounds__(kDeltaThreads)
    WriteKernel(const __grid_constant__ DeviceDeltaScan job, const DeltaRun* runs, int64_t count) {
  const int64_t begin = BeginOfThread<Kind>();
  const bool any = begin < job.elements;
  DeltaRun total;
  const DeltaRun in_block = PrefixOfBlock(any ? CountRun<Kind>(job, begin) : DeltaRun{}, total);
  if (!any) return;
  WriteRun<Kind>(job, begin, Joined(runs[blockIdx.x], in_block),
                 runs[count].changes <= job.changes_max);
}

__global__ void __launch_bounds__(kDeltaThreads)
    CountGapsKernel(const __grid_constant__ DeviceDeltaApply job, GapRun* runs) {
  const int64_t run = static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x;
  GapRun total;
  PrefixOfBlock(CountGaps(job, run * kDeltaRunBytes), total);
  if (threadIdx.x == 0) runs[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kDeltaStepsCounted)
    CountStepsKernel(const __grid_constant__ DeviceDeltaApply job, EscapeCount* counts) {
  const int64_t step = static_cast<int64_t>(blockIdx.x) * kDeltaStepsCounted + threadIdx.x;
  const int escapes = __syncthreads_count(CountEscapes(job, step, step + 1) != 0);
  if (threadIdx.x == 0) counts[blockIdx.x] = {escapes};
}

__global__ void __launch_bounds__(kDeltaThreads)
    ApplyPrefixKernel(const __grid_constant__ DeviceDeltaApply job, GapRun* runs,
                      EscapeCount* counts, uint32_t* applied) {
  const GapRun gaps = PrefixOfAll(runs, DeltaChunks(job.gap_bytes), GapRun{});
  const EscapeCount steps = PrefixOfAll(counts, StepCounts(job.changes), EscapeCount{});
  if (threadIdx.x == 0) *applied = DeltaFits(job, gaps, steps) ? 1 : 0;
}

template <class Kind>
__global__ void __launch_bounds__(kDeltaThreads)
    ApplyKernel(const __grid_constant__ DeviceDeltaApply job, const GapRun* runs,
                const EscapeCount* counts) {
  if (!DeltaFits(job, runs[DeltaChunks(job.gap_bytes)], counts[StepCounts(job.changes)])) return;
  const int64_t begin =
      (static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x) * kDeltaRunBytes;
  GapRun total;
  const GapRun in_block = PrefixOfBlock(CountGaps(job, begin), total);
  ApplyGaps<Kind>(job, begin, Joined(runs[blockIdx.x], in_block), counts);
}

unsigned Blocks(int64_t count) { return static_cast<unsigned>(count); }

}  // namespace

cudaError_t LaunchDeltaScan(DeltaOrder order, const DeviceDeltaScan& job, DeltaCounts* counts,
                            void* scratch, cudaStream_t stream) {
  return VisitDeltaOrder(order, [&](auto kind) {
    using Kind = decltype(kind);
    auto* runs = static_cast<DeltaRun*>(scratch);
    const int64_t chunks = DeltaChunks(job.elements * int64_t{sizeof(typename Kind::Word)});
    if (chunks > 0) CountKernel<Kind><<<Blocks(chunks), kDeltaThreads, 0, stream>>>(job, runs);
    ScanPrefixKernel<<<1, kDeltaThreads, 0, stream>>>(runs, chunks, counts);
    if (chunks > 0) {
      WriteKernel<Kind><<<Blocks(chunks), kDeltaThreads, 0, stream>>>(job, runs, chunks);
    }
    return cudaGetLastError();
  });
}

cudaError_t LaunchDeltaApply(DeltaOrder order, const DeviceDeltaApply& job, uint32_t* applied,
                             void* scratch, cudaStream_t stream) {
  return VisitDeltaOrder(order, [&](auto kind) {
    using Kind = decltype(kind);
    const int64_t chunks = DeltaChunks(job.gap_bytes), counted = StepCounts(job.changes);
    auto* runs = static_cast<GapRun*>(scratch);
    auto* counts = reinterpret_cast<EscapeCount*>(runs + chunks + 1);
    if (chunks > 0) CountGapsKernel<<<Blocks(chunks), kDeltaThreads, 0, stream>>>(job, runs);
    if (counted > 0) {
      CountStepsKernel<<<Blocks(counted), kDeltaStepsCounted, 0, stream>>>(job, counts);
    }
    ApplyPrefixKernel<<<1, kDeltaThreads, 0, stream>>>(job, runs, counts, applied);
    if (chunks > 0) {
      ApplyKernel<Kind><<<Blocks(chunks), kDeltaThreads, 0, stream>>>(job, runs, counts);
    }
    return cudaGetLastError();
  });
}

}  // namespace weightwire::kernels::internal
