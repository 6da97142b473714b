#pragma once

#include <memory>
#include <vector>

#include "server/transport/transport.h"

/// What runs a test that knows host memory only on the memory of a fake GPU.
namespace weightwire::conformance {

/// Memory of the fake GPU, until the region goes.
std::shared_ptr<memory::MemoryRegion> GpuRegion(uint64_t bytes);

/// As a NIC whose writes the GPU sees after a flush only.
Status WriteLate(device::Bytes target, device::ConstBytes source, uint64_t bytes);

/// `inner`, to which every export is of GPU memory: of the bytes that the pieces have then. The
/// pieces live as long as the export.
std::unique_ptr<transport::Transport> ExportsFromGpu(std::unique_ptr<transport::Transport> inner);

/// Stands for the spans of a Get: as many bytes of GPU memory, in spans of the same sizes.
class GpuTargets {
 public:
  explicit GpuTargets(std::vector<transport::MutableSpan> host);
  const std::vector<transport::MutableSpan>& spans() const { return spans_; }
  /// Brings the bytes to the host's spans, once the GPU sees them.
  void Fetch() const;

 private:
  const std::vector<transport::MutableSpan> host_;
  std::shared_ptr<memory::MemoryRegion> region_;  ///< null: no bytes
  std::vector<transport::MutableSpan> spans_;
};

}  // namespace weightwire::conformance
