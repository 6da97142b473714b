#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda.h"
#include "server/base/status.h"
#include "server/device/uuid.h"

namespace weightwire::device {

/// libweightwire_cuda.so, loaded. Never unloaded: the CUDA runtime inside leaves threads behind.
/// Thread-safe.
class Library {
 public:
  /// `path` empty: the library beside the program, else the one that the loader finds.
  ///   kUnavailable / kIoError  no such file, of another build, or no GPU is visible; says which
  static Result<std::shared_ptr<const Library>> Load(const std::string& path);

  /// The GPUs that this process sees, by index.
  const std::vector<Uuid>& devices() const { return devices_; }
  /// kFailedPrecondition / kIoError: this process does not see it; names those that it sees.
  Result<int32_t> IndexOf(const Uuid& uuid) const;

  /// What kernels/cuda.h has.
  struct Calls {
    decltype(&::ww_cuda_abi_version) abi_version = nullptr;
    decltype(&::ww_cuda_error) error = nullptr;
    decltype(&::ww_cuda_device_count) device_count = nullptr;
    decltype(&::ww_cuda_device_uuid) device_uuid = nullptr;
    decltype(&::ww_cuda_device_use) device_use = nullptr;
    decltype(&::ww_cuda_alloc) alloc = nullptr;
    decltype(&::ww_cuda_free) free = nullptr;
    decltype(&::ww_cuda_ipc_export) ipc_export = nullptr;
    decltype(&::ww_cuda_ipc_open) ipc_open = nullptr;
    decltype(&::ww_cuda_ipc_close) ipc_close = nullptr;
    decltype(&::ww_cuda_ipc_bytes) ipc_bytes = nullptr;
    decltype(&::ww_cuda_peer_enable) peer_enable = nullptr;
    decltype(&::ww_cuda_host_register) host_register = nullptr;
    decltype(&::ww_cuda_host_unregister) host_unregister = nullptr;
    decltype(&::ww_cuda_flush_writes) flush_writes = nullptr;
    decltype(&::ww_cuda_stream_create) stream_create = nullptr;
    decltype(&::ww_cuda_stream_destroy) stream_destroy = nullptr;
    decltype(&::ww_cuda_event_create) event_create = nullptr;
    decltype(&::ww_cuda_event_destroy) event_destroy = nullptr;
    decltype(&::ww_cuda_event_record) event_record = nullptr;
    decltype(&::ww_cuda_event_wait) event_wait = nullptr;
    decltype(&::ww_cuda_copy_bytes) copy_bytes = nullptr;
    decltype(&::ww_cuda_copy) copy = nullptr;
    decltype(&::ww_cuda_sum) sum = nullptr;
    decltype(&::ww_cuda_quantize) quantize = nullptr;
    decltype(&::ww_cuda_quantize_four_bit) quantize_four_bit = nullptr;
    decltype(&::ww_cuda_delta_scratch_bytes) delta_scratch_bytes = nullptr;
    decltype(&::ww_cuda_delta_scan) delta_scan = nullptr;
    decltype(&::ww_cuda_delta_apply) delta_apply = nullptr;
  };
  const Calls& calls() const { return calls_; }

 private:
  Library() = default;
  Status Find(void* library);
  Status FindDevices();

  Calls calls_;
  std::vector<Uuid> devices_;
};

}  // namespace weightwire::device
