#pragma once

#include <string>
#include <vector>

#include "server/device/uuid.h"

namespace weightwire::transport {

/// An address of cuda_ipc: "@socket?pid=4026531836&gpu=20bd9f6a,01ab34cd". What follows the socket
/// are facts by which a caller knows before it calls whether it could map the callee's memory; a
/// fact that is not stated is none that stands in the way.
struct CudaIpcAddress {
  std::string socket;
  std::string pid_namespace;      ///< the inode of /proc/self/ns/pid
  std::vector<std::string> gpus;  ///< as device::ShortName has them
};

/// In what the wire takes (256 bytes): JoinGpus.
std::string FormatAddress(const CudaIpcAddress& address);
/// Total.
CudaIpcAddress ParseCudaIpcAddress(const std::string& text);

/// This process's; empty where /proc does not say.
std::string PidNamespace();

}  // namespace weightwire::transport
