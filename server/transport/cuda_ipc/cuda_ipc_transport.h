#pragma once

#include <memory>

#include "server/transport/cuda_ipc/cuda_ipc_memory.h"
#include "server/transport/local_transport.h"

namespace weightwire::transport {

struct CudaIpcOptions {
  LocalOptions local;
  CudaIpcDevices devices;  ///< every GPU that this process sees
  Status none;             ///< why there is none, where `devices` is empty
};

/// Name "cuda_ipc": processes of one user, on one host and in one PID namespace, that see the same
/// GPUs. Maps GPU memory by CUDA's IPC handles, with the lease that came with each slab, and host
/// memory as shm does, so that one session is enough for exports of any mixture. UNTESTED ON
/// HARDWARE.
///
/// Get reads host memory only.
std::unique_ptr<Transport> MakeCudaIpcTransport(CudaIpcOptions options);

}  // namespace weightwire::transport
