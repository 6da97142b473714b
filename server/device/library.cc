#include "server/device/library.h"

#include <dlfcn.h>

#include <algorithm>

#include "server/base/beside_program.h"

namespace weightwire::device {
namespace {

constexpr char kFile[] = "libweightwire_cuda.so";

Status Missing(const std::string& why) {
  return Status(Code::kUnavailable, Reason::kIoError, "no GPU memory: " + why)
      .Remedy(
          "name libweightwire_cuda.so with gpu_library where a GPU and its driver are, or set "
          "gpu to off");
}

}  // namespace

Result<std::shared_ptr<const Library>> Library::Load(const std::string& path) {
  const std::string file = path.empty() ? BesideProgram(kFile) : path;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Fail(Missing(dlerror()));
  std::shared_ptr<Library> library(new Library());
  if (Status found = library->Find(handle); !found.ok())
    return Fail(Missing(file + found.message()));
  if (Status found = library->FindDevices(); !found.ok()) return Fail(Missing(found.message()));
  return library;
}

Status Library::Find(void* library) {
  std::string missing;
  const auto find = [&]<typename Function>(const char* name, Function*& into) {
    into = reinterpret_cast<Function*>(dlsym(library, name));
    if (into == nullptr && missing.empty()) missing = name;
  };
  const auto incomplete = [&missing] {
    return Status(Code::kUnavailable, Reason::kIoError, " has no " + missing);
  };
  find("ww_cuda_abi_version", calls_.abi_version);
  if (!missing.empty()) return incomplete();
  if (calls_.abi_version() != WW_CUDA_ABI_VERSION) {
    return Status(Code::kUnavailable, Reason::kIoError, " is of another build of weightwire");
  }
  find("ww_cuda_error", calls_.error);
  find("ww_cuda_device_count", calls_.device_count);
  find("ww_cuda_device_uuid", calls_.device_uuid);
  find("ww_cuda_device_use", calls_.device_use);
  find("ww_cuda_alloc", calls_.alloc);
  find("ww_cuda_free", calls_.free);
  find("ww_cuda_ipc_export", calls_.ipc_export);
  find("ww_cuda_ipc_open", calls_.ipc_open);
  find("ww_cuda_ipc_close", calls_.ipc_close);
  find("ww_cuda_ipc_bytes", calls_.ipc_bytes);
  find("ww_cuda_peer_enable", calls_.peer_enable);
  find("ww_cuda_host_register", calls_.host_register);
  find("ww_cuda_host_unregister", calls_.host_unregister);
  find("ww_cuda_flush_writes", calls_.flush_writes);
  find("ww_cuda_stream_create", calls_.stream_create);
  find("ww_cuda_stream_destroy", calls_.stream_destroy);
  find("ww_cuda_event_create", calls_.event_create);
  find("ww_cuda_event_destroy", calls_.event_destroy);
  find("ww_cuda_event_record", calls_.event_record);
  find("ww_cuda_event_wait", calls_.event_wait);
  find("ww_cuda_copy_bytes", calls_.copy_bytes);
  find("ww_cuda_copy", calls_.copy);
  find("ww_cuda_sum", calls_.sum);
  find("ww_cuda_quantize", calls_.quantize);
  find("ww_cuda_quantize_four_bit", calls_.quantize_four_bit);
  find("ww_cuda_delta_scratch_bytes", calls_.delta_scratch_bytes);
  find("ww_cuda_delta_scan", calls_.delta_scan);
  find("ww_cuda_delta_apply", calls_.delta_apply);
  return missing.empty() ? OkStatus() : incomplete();
}

Status Library::FindDevices() {
  const auto failed = [this] {
    return Status(Code::kUnavailable, Reason::kIoError, calls_.error());
  };
  int32_t count = 0;
  if (calls_.device_count(&count) != WW_CUDA_OK) return failed();
  for (int32_t index = 0; index < count; ++index) {
    Uuid uuid;
    if (calls_.device_uuid(index, uuid.bytes.data()) != WW_CUDA_OK) return failed();
    devices_.push_back(uuid);
  }
  if (devices_.empty()) return Status(Code::kUnavailable, Reason::kIoError, "no GPU is visible");
  return OkStatus();
}

Result<int32_t> Library::IndexOf(const Uuid& uuid) const {
  const auto found = std::ranges::find(devices_, uuid);
  if (found != devices_.end()) return static_cast<int32_t>(found - devices_.begin());
  std::string seen;
  for (const Uuid& one : devices_) seen += (seen.empty() ? "" : ", ") + ToString(one);
  return Fail(Status(Code::kFailedPrecondition, Reason::kIoError,
                     ToString(uuid) + " is not visible here; visible are " + seen)
                  .Remedy("let the agent's container see every GPU of its pod"));
}

}  // namespace weightwire::device
