#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "server/memory/gpu_memory_pool.h"
#include "server/plan/plan.h"
#include "server/transfer/transfer.h"

/// Hand-made plans with memory on both sides, and the bytes that must arrive: element by element,
/// with code of its own.
namespace weightwire::transfer::testing {

using Rng = std::mt19937_64;
/// Uniform in [0, bound).
uint32_t Below(Rng& rng, uint32_t bound);
/// Env WEIGHTWIRE_SEED, or `fallback`.
uint64_t SeedOr(uint64_t fallback);

struct PlanShape {
  uint32_t source_ranks = 2;
  uint32_t target_ranks = 2;
  int ops_per_stream_max = 6;
  int64_t elements_per_op_max = 4'000;
  int quantized_ops_per_stream = 0;  ///< beyond the others: codes or scales of fp8 or four bits
  /// Matrices of which every source rank has some rows: gathered, and made into codes and scales.
  int gathered_per_target = 0;
};

/// Every op has a source and a target tensor of its own, with gaps, permuted strides and sometimes
/// a cast; tensors lie at odd places of one region for each rank, and what a target gathers is its
/// last one.
struct RandomPlan {
  plan::TransferPlan plan;
  std::vector<std::vector<uint64_t>> source_tensor_bytes;  ///< by rank, by tensor
  std::vector<std::vector<uint64_t>> target_tensor_bytes;
};
/// One contiguous byte tensor for each stream: `stream_bytes[source rank][target rank]`, 0 for
/// none.
RandomPlan MakeSizedPlan(const std::vector<std::vector<int64_t>>& stream_bytes);
RandomPlan MakeRandomPlan(Rng& rng, const PlanShape& shape);

/// Memory of one rank: all of it, or what lies in no other region of the binding.
struct RankMemory {
  std::shared_ptr<memory::MemoryRegion> region;
  Binding binding;
  std::vector<std::byte> Snapshot() const;
  /// All of it.
  void Write(std::span<const std::byte> bytes) const;
};
/// The same bytes at the same offsets of a GPU pool.
RankMemory OnDevice(const RankMemory& memory, memory::GpuMemoryPool& gpu_pools);
/// The same, but tensors lie in turn where they are and in GPU pools of each pool.
RankMemory Mixed(const RankMemory& memory, const std::vector<memory::GpuMemoryPool*>& pools);
/// Filled with random bytes; floats that casts read are finite.
RankMemory MakeMemory(Rng& rng, const std::vector<uint64_t>& tensor_bytes);
/// Transform the elements that casts read ordinary floats.
void TameFloats(Rng& rng, const plan::TransferPlan& plan, uint32_t source_rank,
                const RankMemory& memory);

/// A new version: every byte of the host's is another one, but for floats that casts read.
void ChangeAll(Rng& rng, const plan::TransferPlan& plan, const std::vector<RankMemory>& sources);

/// A new version: about `share` of the bytes are other ones, each by its lowest bit.
void ChangeSome(Rng& rng, const std::vector<RankMemory>& sources, double share);

/// What `target` must hold afterwards, gaps included.
std::vector<std::byte> Expected(const plan::TransferPlan& plan, uint32_t target_rank,
                                const RankMemory& target, const std::vector<RankMemory>& sources);

}  // namespace weightwire::transfer::testing
