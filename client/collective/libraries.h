#pragma once

#include <string>

#include "client/collective/nccl_abi.h"
#include "kernels/cuda.h"
#include "server/base/status.h"

namespace weightwire::collective {

/// Of libweightwire_cuda.so (kernels/cuda.h): events on the caller's streams.
struct EventFunctions {
  decltype(&::ww_cuda_abi_version) ww_cuda_abi_version = nullptr;
  decltype(&::ww_cuda_error) ww_cuda_error = nullptr;
  decltype(&::ww_cuda_event_create) ww_cuda_event_create = nullptr;
  decltype(&::ww_cuda_event_destroy) ww_cuda_event_destroy = nullptr;
  decltype(&::ww_cuda_event_record) ww_cuda_event_record = nullptr;
  decltype(&::ww_cuda_event_query) ww_cuda_event_query = nullptr;
};

struct Libraries {
  nccl::Functions nccl;
  EventFunctions events;
};

/// Opens both by path or by the loader's own search; they stay open until the process ends (NCCL
/// leaves threads behind). An NCCL that the process has loaded already, torch's say, is the one.
///   kUnavailable / kTransportFailed  not there, too old, or a symbol is missing; says which
Result<Libraries> LoadLibraries(const std::string& nccl_library, const std::string& cuda_library);

}  // namespace weightwire::collective
