#pragma once

#include <memory>

#include "server/transport/local_transport.h"

namespace weightwire::transport {

using ShmOptions = LocalOptions;

/// Name "shm": processes of one user on one host, host memory only. Regions are passed as file
/// descriptors and mapped read-only, once for each session.
std::unique_ptr<Transport> MakeShmTransport(ShmOptions options);

}  // namespace weightwire::transport
