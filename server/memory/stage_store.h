#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/base/ids.h"
#include "server/memory/region.h"

namespace weightwire::memory {

/// Where each local tensor of a rank lies in one of its buffers: offsets aligned to 64 bytes, in
/// binding order. The same function on both sides of the fd, so only the total needs checking.
struct ArenaMap {
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> sizes;
  uint64_t bytes_total = 0;  ///< ≥ 1
};
///   kInvalidArgument / kShapeOverflow  the sum does not fit
Result<ArenaMap> ArenaMapOf(const std::vector<uint64_t>& tensor_bytes);

/// One rank's two buffers for the `flip` install: `live` holds what the engine serves, `next` is
/// written by the epoch in progress. Each is one memfd that the engine's process maps too.
///
/// Not thread-safe: belongs to the agent's strand. Budget: 2 × arena bytes, allocated at once.
class StageBuffers {
 public:
  static Result<std::unique_ptr<StageBuffers>> Make(const std::string& name, ArenaMap arena);

  const ArenaMap& arena() const { return arena_; }
  const std::shared_ptr<MemoryRegion>& region(int buffer) const { return regions_[buffer]; }
  /// Index (0, 1) of the buffer that holds the served epoch; −1 when the engine has none.
  int live() const { return live_; }
  Epoch live_epoch() const { return live_epoch_; }
  /// The buffer that an epoch may write now.
  int next() const { return live_ == 0 ? 1 : 0; }
  /// The engine swapped: what was `next` is `live` from now on.
  void Flip(Epoch epoch);
  /// The engine restarted or is DIRTY: nothing is served any more.
  void Forget();

 private:
  StageBuffers() = default;
  ArenaMap arena_;
  std::array<std::shared_ptr<MemoryRegion>, 2> regions_;
  int live_ = -1;
  Epoch live_epoch_{};
};

}  // namespace weightwire::memory
