#pragma once

#include <cstdint>

#include "server/layout/types.h"
#include "server/memory/stage_store.h"
#include "server/transfer/transfer.h"

/// Memory that an agent takes beyond what its trainers and engines hold: said here once, for what
/// allocates it and for what foretells it.
namespace weightwire::transfer {

/// One pool of the process.
struct PoolSize {
  uint64_t slot_bytes = 0;
  uint32_t slots = 0;
  uint64_t bytes() const { return slot_bytes * slots; }
};
/// What is packed to be sent, shared by all source ranks of an agent.
PoolSize SlotPoolSize(const Tuning& tuning);
/// What is received to be unpacked, shared by all target ranks of an agent.
PoolSize ScratchPoolSize(const Tuning& tuning);
/// What is taken of each GPU's GPU pool for both, where a transport reaches GPU memory.
uint64_t GpuPoolBytes(const Tuning& tuning);

/// One buffer of the stage of an engine's rank.
///   kInvalidArgument / kShapeOverflow  a size does not fit; names the tensor
Result<memory::ArenaMap> StageArenaOf(const layout::RankLayout& rank);
/// All `buffers` of it (memory::StageBuffers); UINT64_MAX when that does not fit.
uint64_t StageBytes(const memory::ArenaMap& arena, uint32_t buffers);

/// What a rank of the plan gathers in, beside its stage: taken with the first plan that needs it,
/// and kept for the next versions.
uint64_t GatherBytes(const plan::GatherBuffer& gathered);

}  // namespace weightwire::transfer
