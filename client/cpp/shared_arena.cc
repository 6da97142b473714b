#include "client/cpp/shared_arena.h"

namespace weightwire::client {

Result<SharedArena> SharedArena::Make(const std::string& name, const layout::RankLayout& layout) {
  std::vector<uint64_t> sizes;
  sizes.reserve(layout.tensors.size());
  for (const layout::LocalTensor& tensor : layout.tensors) {
    const auto bytes = layout::StorageBytes(tensor.dtype, tensor.shape);
    if (!bytes) {
      return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow, "the size does not fit")
                      .AtTensor(tensor.name));
    }
    sizes.push_back(static_cast<uint64_t>(*bytes));
  }
  WW_ASSIGN(memory::ArenaMap map, memory::ArenaMapOf(sizes));
  WW_ASSIGN(auto region, memory::MemoryRegion::Allocate(name, map.bytes_total));
  return SharedArena(std::move(region), std::move(map));
}

}  // namespace weightwire::client
