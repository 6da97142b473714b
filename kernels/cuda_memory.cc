// Memory of the C interface: allocations, what other processes see of them, and host memory that
// devices reach.
#include <cstring>

#include "kernels/cuda_call.h"

using namespace weightwire::kernels::internal;  // NOLINT: the interface itself has no namespace

int32_t ww_cuda_alloc(int32_t device, size_t bytes, void** memory) {
  *memory = nullptr;
  if (bytes == 0) return Fail(WW_CUDA_INVALID, "ww_cuda_alloc", "0 bytes");
  return OnDevice(device, "ww_cuda_alloc", [&] { return cudaMalloc(memory, bytes); });
}

int32_t ww_cuda_free(int32_t device, void* memory) {
  return OnDevice(device, "ww_cuda_free", [&] { return cudaFree(memory); });
}

int32_t ww_cuda_ipc_export(int32_t device, void* memory, uint8_t* handle) {
  cudaIpcMemHandle_t made;
  static_assert(sizeof made == WW_CUDA_IPC_BYTES);
  int32_t status =
      OnDevice(device, "ww_cuda_ipc_export", [&] { return cudaIpcGetMemHandle(&made, memory); });
  if (status == WW_CUDA_OK) std::memcpy(handle, &made, sizeof made);
  return status;
}

int32_t ww_cuda_ipc_open(int32_t device, const uint8_t* handle, void** memory) {
  *memory = nullptr;
  cudaIpcMemHandle_t given;
  std::memcpy(&given, handle, sizeof given);
  return OnDevice(device, "ww_cuda_ipc_open", [&] {
    return cudaIpcOpenMemHandle(memory, given, cudaIpcMemLazyEnablePeerAccess);
  });
}

int32_t ww_cuda_ipc_close(int32_t device, void* memory) {
  return OnDevice(device, "ww_cuda_ipc_close", [&] { return cudaIpcCloseMemHandle(memory); });
}

int32_t ww_cuda_host_register(void* memory, size_t bytes) {
  return Checked(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                 "ww_cuda_host_register");
}

int32_t ww_cuda_host_unregister(void* memory) {
  return Checked(cudaHostUnregister(memory), "ww_cuda_host_unregister");
}

int32_t ww_cuda_copy_bytes(int32_t device, ww_cuda_stream stream, void* target, const void* source,
                           size_t bytes) {
  if (bytes > 0 && (target == nullptr || source == nullptr)) {
    return Fail(WW_CUDA_INVALID, "ww_cuda_copy_bytes", "a memory is null");
  }
  return OnDevice(device, "ww_cuda_copy_bytes", [&] {
    return cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, AsStream(stream));
  });
}
