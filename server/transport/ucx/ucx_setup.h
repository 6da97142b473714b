#pragma once

#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/transport/ucx/ucx_plugin.h"
#include "server/transport/ucx/ucx_transport.h"

namespace weightwire::transport {

struct UcxSetup {
  std::unique_ptr<UcxWorker> worker;
  std::string choices;      ///< devices and why; what GPU-direct lacks
  bool gpu_direct = false;  ///< nothing lacks, and it is not off
};

/// A worker on the network devices that ucx_rails.h chooses; shows them in the metric ucx_devices.
///   kUnavailable / kTransportFailed         there is no UCX; as MakeUcxWorker
///   kInvalidArgument / kConfigInvalid       the setting names devices that UCX does not have
///   kFailedPrecondition / kTransportFailed  GPU-direct is required and cannot be had; says why
Result<UcxSetup> SetUpUcx(const UcxOptions& options);

}  // namespace weightwire::transport
