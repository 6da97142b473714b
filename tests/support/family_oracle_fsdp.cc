#include "tests/support/family_oracle_fsdp.h"

#include <algorithm>

namespace weightwire::family_oracle {
namespace {

bool Contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

/// torch.chunk(tensor, parts, dim)[index]; no extent in `dim` when there are fewer chunks.
Array Chunk(const Array& whole, int64_t parts, size_t dim, int64_t index) {
  const int64_t size = whole.shape.at(dim), each = (size + parts - 1) / parts;
  const int64_t begin = std::min(size, index * each), end = std::min(size, begin + each);
  int64_t inner = 1;
  for (size_t d = dim + 1; d < whole.shape.size(); ++d) inner *= whole.shape[d];
  Array out{whole.shape, {}, whole.f32};
  out.shape[dim] = end - begin;
  for (size_t at = 0; at < whole.cells.size(); ++at) {
    const int64_t position = static_cast<int64_t>(at) / inner % size;
    if (position >= begin && position < end) out.cells.push_back(whole.cells[at]);
  }
  return out;
}

/// The dimension that the usual tensor-parallel plans cut; −1: none. Experts that are one tensor
/// have inputs first.
int TensorParallelDim(const std::string& name) {
  for (const char* tower : {"visual.", "model.visual.", "vision_tower.", "vision_model."}) {
    if (name.starts_with(tower)) return -1;
  }
  if (name.ends_with("experts.gate_up_proj")) return 2;
  if (name.ends_with("experts.gate_up_proj_bias") || name.ends_with("experts.down_proj")) return 1;
  for (const char* part : {".q_proj.", ".k_proj.", ".v_proj.", ".qkv_proj.", ".q_b_proj.",
                           ".kv_b_proj.", ".gate_proj.", ".up_proj.", ".gate_up_proj.", ".w1.",
                           ".w3.", "embed_tokens.", "lm_head.", ".sinks"}) {
    if (Contains(name, part)) return 0;
  }
  for (const char* part : {".o_proj.weight", ".down_proj.weight", ".w2."}) {
    if (Contains(name, part)) return 1;
  }
  return -1;
}

/// The parameter flattened, padded to a multiple of the shards and cut evenly.
Array Partition(const Array& whole, int64_t shards, int64_t index) {
  std::vector<uint64_t> flat = whole.cells;
  while (std::ssize(flat) % shards != 0) flat.push_back(kPadding);
  const int64_t size = std::ssize(flat) / shards;
  return {{size}, {flat.begin() + index * size, flat.begin() + (index + 1) * size}, whole.f32};
}

/// By tensor parallelism first, then what is left by the shards.
Array Shard(const std::string& name, const Array& whole, const FsdpShape& s, int64_t rank) {
  const int tp_dim = TensorParallelDim(name);
  const size_t dim = std::ssize(whole.shape) > s.dim ? static_cast<size_t>(s.dim) : 0;
  const int64_t t = rank % s.tp, shard = rank / s.tp % s.dp;
  Array mine = tp_dim < 0 ? whole : Chunk(whole, s.tp, static_cast<size_t>(tp_dim), t);
  mine = Chunk(mine, s.dp, dim, shard);
  if (mine.cells.empty()) mine.shape[dim] = 0;
  return mine;
}

}  // namespace

std::vector<Tensors> FsdpRanks(const Tensors& hf, const FsdpShape& s) {
  std::vector<Tensors> ranks(static_cast<size_t>(s.hsdp * s.dp * s.tp));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto number = static_cast<int64_t>(rank);
    for (const auto& [name, whole] : hf) {
      const bool buffer = name.ends_with("e_score_correction_bias");
      ranks[rank][name] = buffer    ? whole
                          : s.zero3 ? Partition(whole, s.dp, number % s.dp)
                                    : Shard(name, whole, s, number);
    }
  }
  return ranks;
}

}  // namespace weightwire::family_oracle
