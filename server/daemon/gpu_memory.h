#pragma once

#include "server/daemon/config.h"
#include "server/memory/gpu_memory_pool.h"

namespace weightwire::daemon {

/// Takes the configured memory of every GPU that this process sees; once, at the start. What is
/// missing is in `none`, and an error only with gpu: required.
///   kUnavailable / kIoError              no library, no driver, no GPU
///   kResourceExhausted / kLimitExceeded  a GPU has less: names the bytes and the GPU
Result<memory::GpuMemoryPools> LendGpuMemory(const Config& config);

}  // namespace weightwire::daemon
