#pragma once

#include <memory>

#include "server/transport/nccl/nccl_transport.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::conformance {

/// nccl on one of the fake GPUs, over a fake NCCL. Its buffers are so small that most of what is
/// read goes in several rounds, which end where nobody expects.
inline transport::NcclOptions FakeNcclOptions(transport::TcpOptions sessions, size_t gpu) {
  transport::NcclOptions options;
  options.sessions = std::move(sessions);
  options.library = WEIGHTWIRE_NCCL_LIBRARY;
  options.nccl_library = options.cuda_library = FAKE_NCCL_LIBRARY;
  const auto device = testing::WideFakeDevice(gpu);
  options.devices.emplace(device->uuid(), device);
  options.buffer_bytes = (1 << 20) + 77;
  options.release_grace = std::chrono::seconds(2);
  return options;
}

inline std::unique_ptr<transport::Transport> MakeFakeNccl(transport::TcpOptions sessions,
                                                          size_t gpu) {
  return transport::MakeNcclTransport(FakeNcclOptions(std::move(sessions), gpu));
}

}  // namespace weightwire::conformance
