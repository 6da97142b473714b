#include "client/collective/libraries.h"

#include <dlfcn.h>

namespace weightwire::collective {
namespace {

Status Missing(const std::string& why, const char* remedy) {
  return Status(Code::kUnavailable, Reason::kTransportFailed, why).Remedy(remedy);
}

constexpr char kNcclRemedy[] =
    "install NCCL 2.18 or newer (pip: nvidia-nccl-cu13, Debian: libnccl2) or name its file: "
    "nccl_library, or WEIGHTWIRE_NCCL_LIBRARY; without it leave Collective out, the data plane "
    "does not need it";
constexpr char kCudaRemedy[] =
    "build weightwire with the CUDA toolkit and name libweightwire_cuda.so: cuda_library, or "
    "WEIGHTWIRE_CUDA_LIBRARY";

/// Looks symbols up one after the other; remembers the first that is missing.
class Library {
 public:
  Library(const std::string& file, const char* remedy)
      : file_(file), remedy_(remedy), handle_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) status_ = Missing("cannot load " + file + ": " + dlerror(), remedy);
  }

  template <typename Function>
  void Find(const char* name, Function& function) {
    if (!status_.ok()) return;
    function = reinterpret_cast<Function>(dlsym(handle_, name));
    if (function == nullptr) status_ = Missing(file_ + " has no symbol " + name, remedy_);
  }
  const Status& status() const { return status_; }

 private:
  const std::string file_;
  const char* const remedy_;
  void* const handle_;
  Status status_;
};
#define WW_FIND(table, name) library.Find(#name, table.name)

Status LoadNccl(const std::string& file, nccl::Functions& nccl) {
  Library library(file, kNcclRemedy);
  WW_FIND(nccl, ncclGetVersion);
  WW_FIND(nccl, ncclGetUniqueId);
  WW_FIND(nccl, ncclCommInitRankConfig);
  WW_FIND(nccl, ncclCommGetAsyncError);
  WW_FIND(nccl, ncclCommFinalize);
  WW_FIND(nccl, ncclCommDestroy);
  WW_FIND(nccl, ncclCommAbort);
  WW_FIND(nccl, ncclBroadcast);
  WW_FIND(nccl, ncclSend);
  WW_FIND(nccl, ncclRecv);
  WW_FIND(nccl, ncclGroupStart);
  WW_FIND(nccl, ncclGroupEnd);
  WW_FIND(nccl, ncclGetErrorString);
  WW_FIND(nccl, ncclGetLastError);
  if (!library.status().ok()) return library.status();
  int version = 0;
  if (nccl.ncclGetVersion(&version) != nccl::kSuccess || version < nccl::kVersionMin) {
    return Missing(file + " is NCCL " + std::to_string(version) + "; 21800 (2.18) is needed",
                   kNcclRemedy);
  }
  return OkStatus();
}

Status LoadEvents(const std::string& file, EventFunctions& events) {
  Library library(file, kCudaRemedy);
  WW_FIND(events, ww_cuda_abi_version);
  WW_FIND(events, ww_cuda_error);
  WW_FIND(events, ww_cuda_event_create);
  WW_FIND(events, ww_cuda_event_destroy);
  WW_FIND(events, ww_cuda_event_record);
  WW_FIND(events, ww_cuda_event_query);
  if (!library.status().ok()) return library.status();
  if (events.ww_cuda_abi_version() != WW_CUDA_ABI_VERSION) {
    return Missing(file + " is of another build of weightwire", kCudaRemedy);
  }
  return OkStatus();
}

}  // namespace

Result<Libraries> LoadLibraries(const std::string& nccl_library, const std::string& cuda_library) {
  Libraries libraries;
  WW_FAIL_IF_ERROR(LoadNccl(nccl_library, libraries.nccl));
  WW_FAIL_IF_ERROR(LoadEvents(cuda_library, libraries.events));
  return libraries;
}

}  // namespace weightwire::collective
