#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "server/base/status.h"
#include "server/layout/types.h"
#include "server/memory/region.h"
#include "server/memory/stage_store.h"

namespace weightwire::client {

/// Tensors one after another in one sealed memfd, each at a multiple of 64 bytes.
class SharedArena {
 public:
  /// kInvalidArgument / kShapeOverflow; kResourceExhausted / kLimitExceeded.
  static Result<SharedArena> Make(const std::string& name, const layout::RankLayout& layout);

  size_t tensor_count() const { return map_.offsets.size(); }
  std::span<std::byte> tensor(size_t index) const {
    return {region_->data() + map_.offsets[index], map_.sizes[index]};
  }
  const memory::ArenaMap& map() const { return map_; }
  const memory::MemoryRegion& region() const { return *region_; }

 private:
  SharedArena(std::shared_ptr<memory::MemoryRegion> region, memory::ArenaMap map)
      : region_(std::move(region)), map_(std::move(map)) {}
  std::shared_ptr<memory::MemoryRegion> region_;
  memory::ArenaMap map_;
};

}  // namespace weightwire::client
