// Memory of the C interface: allocations, what other processes see of them, and host memory that
// devices reach.
#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/cuda_call.h"

namespace weightwire::kernels::internal {
namespace {

enum class Writes : int { kUnknown = 0, kOrdered, kFlushed, kLost };

constexpr int32_t kDevicesMax = 64;

/// What is to be done about writes of others to the memory of the thread's current device.
cudaError_t AskHowWritesAreSeen(int32_t device, Writes* writes) {
  int ordering = 0, options = 0;
  cudaError_t error =
      cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&options, cudaDevAttrGPUDirectRDMAFlushWritesOptions, device);
  if (error != cudaSuccess) return error;
  if (ordering >= cudaGPUDirectRDMAWritesOrderingOwner) {
    *writes = Writes::kOrdered;
  } else {
    const bool host_can = (options & cudaFlushGPUDirectRDMAWritesOptionHost) != 0;
    *writes = host_can ? Writes::kFlushed : Writes::kLost;
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace weightwire::kernels::internal

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

// The runtime does not tell it, and the driver is not linked. Its types, without its header.
int32_t ww_cuda_ipc_bytes(int32_t device, const void* memory, size_t* bytes) {
  using AddressRange = int (*)(unsigned long long*, size_t*, unsigned long long);
  constexpr unsigned kVersion = 12'000;
  *bytes = 0;
  DeviceScope scope(device, "ww_cuda_ipc_bytes");
  if (scope.status() != WW_CUDA_OK) return scope.status();
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (const int32_t status =
          Checked(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, kVersion,
                                                   cudaEnableDefault, &result),
                  "ww_cuda_ipc_bytes");
      status != WW_CUDA_OK) {
    return status;
  }
  unsigned long long base = 0;
  const auto at = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(memory));
  if (result != cudaDriverEntryPointSuccess ||
      reinterpret_cast<AddressRange>(found)(&base, bytes, at) != 0 || base > at ||
      *bytes < at - base) {
    *bytes = 0;
    return Fail(WW_CUDA_FAILED, "ww_cuda_ipc_bytes", "the driver does not know this memory");
  }
  *bytes -= at - base;
  return WW_CUDA_OK;
}

int32_t ww_cuda_peer_enable(int32_t device, int32_t peer) {
  for (const auto& [from, to] : {std::pair(device, peer), std::pair(peer, device)}) {
    DeviceScope scope(from, "ww_cuda_peer_enable");
    if (scope.status() != WW_CUDA_OK) return scope.status();
    const cudaError_t error = cudaDeviceEnablePeerAccess(to, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();
      continue;
    }
    if (const int32_t status = Checked(error, "ww_cuda_peer_enable"); status != WW_CUDA_OK) {
      return status;
    }
  }
  return WW_CUDA_OK;
}

int32_t ww_cuda_host_register(void* memory, size_t bytes) {
  return Checked(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
                 "ww_cuda_host_register");
}

int32_t ww_cuda_host_unregister(void* memory) {
  return Checked(cudaHostUnregister(memory), "ww_cuda_host_unregister");
}

int32_t ww_cuda_flush_writes(int32_t device) {
  constexpr const char* kName = "ww_cuda_flush_writes";
  static std::atomic<Writes> known[kDevicesMax];
  DeviceScope scope(device, kName);
  if (scope.status() != WW_CUDA_OK) return scope.status();
  Writes writes = device < kDevicesMax ? known[device].load() : Writes::kUnknown;
  if (writes == Writes::kUnknown) {
    if (int32_t bad = Checked(AskHowWritesAreSeen(device, &writes), kName)) return bad;
    if (device < kDevicesMax) known[device] = writes;
  }
  if (writes == Writes::kOrdered) return WW_CUDA_OK;
  if (writes == Writes::kLost) {
    return Fail(WW_CUDA_FAILED, kName,
                "the device neither orders the writes of a NIC nor can be told to flush them");
  }
  return Checked(cudaDeviceFlushGPUDirectRDMAWrites(cudaFlushGPUDirectRDMAWritesTargetCurrentDevice,
                                                    cudaFlushGPUDirectRDMAWritesToOwner),
                 kName);
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
