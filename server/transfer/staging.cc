#include "server/transfer/staging.h"

#include <algorithm>
#include <vector>

#include "server/base/checked.h"

namespace weightwire::transfer {
namespace {

constexpr uint64_t kPageBytes = 4'096;
constexpr uint64_t kSlotAlignment = 64;

}  // namespace

PoolSize SlotPoolSize(const Tuning& tuning) {
  return {static_cast<uint64_t>(tuning.slot_bytes), tuning.slots_in_pool};
}

// A scratch slot takes one chunk's segments, each padded.
PoolSize ScratchPoolSize(const Tuning& tuning) {
  const auto most = static_cast<uint64_t>(std::max(tuning.chunk_bytes, tuning.segment_bytes_max));
  return {RoundUp(most + kSlotAlignment, kPageBytes), tuning.slots_in_pool};
}

uint64_t GpuPoolBytes(const Tuning& tuning) {
  return SlotPoolSize(tuning).bytes() + ScratchPoolSize(tuning).bytes();
}

Result<memory::ArenaMap> StageArenaOf(const layout::RankLayout& rank) {
  std::vector<uint64_t> sizes;
  sizes.reserve(rank.tensors.size());
  for (const layout::LocalTensor& tensor : rank.tensors) {
    const auto bytes = layout::StorageBytes(tensor.dtype, tensor.shape);
    if (!bytes || *bytes < 0) {
      return Fail(
          Status(Code::kInvalidArgument, Reason::kShapeOverflow, "the tensor's size overflows")
              .AtTensor(tensor.name));
    }
    sizes.push_back(static_cast<uint64_t>(*bytes));
  }
  return memory::ArenaMapOf(sizes);
}

uint64_t StageBytes(const memory::ArenaMap& arena, uint32_t buffers) {
  return CheckedMul(buffers, arena.bytes_total).value_or(UINT64_MAX);
}

uint64_t GatherBytes(const plan::GatherBuffer& gathered) {
  if (gathered.elements == 0) return 0;
  return RoundUp(static_cast<uint64_t>(plan::GatherBufferBytes(gathered)), kPageBytes);
}

}  // namespace weightwire::transfer
