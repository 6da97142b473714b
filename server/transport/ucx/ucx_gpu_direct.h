#pragma once

#include <cstddef>
#include <string>

#include "server/base/status.h"

namespace weightwire::transport {

/// What weights need to go between GPU memory and the network without a copy in host memory.
struct UcxGpuDirectFacts {
  size_t gpus = 0;
  size_t rdma_devices = 0;      ///< that UCX may use
  bool ucx_knows_cuda = false;  ///< libucp reaches CUDA memory
  std::string peer_memory;      ///< as UcxTopology has it
  bool weights_on_gpu =
      false;  ///< this process lends GPU memory to ranks (memory/gpu_memory_pool.h)
};

/// OK, or everything that is missing: kFailedPrecondition / kTransportFailed, with a remedy. Pure.
Status CheckUcxGpuDirect(const UcxGpuDirectFacts& facts);

}  // namespace weightwire::transport
