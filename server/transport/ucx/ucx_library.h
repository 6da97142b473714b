#pragma once

#include <memory>

#include "server/base/status.h"
#include "server/transport/ucx/ucx_plugin.h"

namespace weightwire::transport {

/// A worker of libweightwire_ucx.so, which is loaded once and never unloaded.
///   kUnavailable / kTransportFailed  no plug-in, one of another build, or UCX refuses; says which
Result<std::unique_ptr<UcxWorker>> MakeUcxWorker(const UcxWorkerOptions& options);

}  // namespace weightwire::transport
