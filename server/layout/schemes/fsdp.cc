// What FSDP and ZeRO trainers hold, by Hugging Face names:
//
//   dpN            shards; default 1
//   hsdpN          replicas of each shard: N groups of dp · tp ranks
//   tpN            tensor parallelism first, see TorchTensors; kind=fsdp2 only
//   kind=fsdp2     one DTensor for each parameter (the default)
//   kind=fsdp1     one flat parameter for each decoder layer and one for the rest
//   kind=fsdp1-orig   the same with use_orig_params: each parameter's part of it
//   kind=zero3     DeepSpeed ZeRO-3's partitions
//   dim=N          kind=fsdp2: cut tensors of more than N dimensions along N, others along 0
//   align=N        kind=fsdp1-orig: see below
//   mtp=none       without the MTP layers, which transformers itself does not build; mtp=single and
//                  mtp=fused as in hf.cc
//
// Rank = t + T · (shard + DP · replica): a device mesh (replicate, shard, tp) in its own order.
//
// fsdp2: torch.chunk along one dimension: ceil(size / shards) each; the last ones are short, or
// empty with extent 0 there, which is what such a DTensor's local tensor reports. Under tensor
// parallelism torch.chunk cuts by t first, then each part (_StridedShard). FSDP2 itself refuses
// uneven shards of dimensions but the first; distribute_tensor makes them.
//
// fsdp1: a wrapped module's parameters one after another in module order (fsdp_order.h), padded to
// a multiple of the shards and cut evenly. Names are those of FSDP's state dict, without
// "_fsdp_wrapped_module.". With use_orig_params each parameter begins at a multiple of 16 bytes of
// the dtype of the forward pass (align=N where mixed precision makes that other than N elements of
// the model's dtype), and a rank has one dimension of each parameter's elements that lie in its
// part, none maybe; a single shard is not flattened.
//
// zero3: each parameter flattened, padded to a multiple of the shards and cut evenly; what a rank
// binds is ds_tensor, padding included.
//
// Buffers (the routers' correction) are whole everywhere.
//
// The scales of fp8 weights are parameters of their own: data-parallel shards of the two need not
// meet at a block, tensor parallelism may not cut through one. Flat parameters have one dtype and
// are refused.
//
// Proved with torch 2.15 and transformers 4.57 (tests/golden/fsdp.py): fsdp2 with all its words,
// fsdp1, fsdp1-orig. By reading only: zero3 (DeepSpeed partition_parameters.py), align=.
#include "server/layout/schemes/fsdp.h"

#include <algorithm>
#include <array>

#include "server/layout/blocks.h"
#include "server/layout/schemes/fsdp_cut.h"
#include "server/layout/schemes/option.h"
#include "server/layout/schemes/rank_builder.h"
#include "server/layout/schemes/role_cutter.h"
#include "server/layout/schemes/scale_tensors.h"
#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {
namespace fsdp {
namespace {

constexpr std::array<std::string_view, 4> kKinds = {"fsdp2", "fsdp1", "fsdp1-orig", "zero3"};

/// Refuses a word that the spec has although it means nothing to its kind.
Status CheckOnlyFor(Kind kind, bool given, Kind wanted, std::string_view word) {
  if (!given || kind == wanted) return OkStatus();
  return BadOption(
      "kind", kKinds[static_cast<size_t>(kind)],
      std::string(kKinds[static_cast<size_t>(wanted)]) + ", which " + std::string(word) + " needs");
}

/// Refuses fp8 weights in flat parameters, and tensor parallelism that cuts through their blocks.
Status CheckScales(const Model& model, std::span<const TorchTensor> tensors,
                   const Sharding& sharding) {
  if (!model.config().scales) return OkStatus();
  if (sharding.kind == Kind::kFsdp1 || sharding.kind == Kind::kFsdp1Orig) {
    return BadOption("kind", kKinds[static_cast<size_t>(sharding.kind)],
                     "known for fp8 weights, since a flat parameter has one dtype");
  }
  const int64_t blocks[] = {model.config().scales->rows, model.config().scales->columns};
  for (const TorchTensor& torch : tensors) {
    if (torch.tp_dim < 0 || !model.ScalesOf(torch.tensor)) continue;
    const auto dim = static_cast<size_t>(torch.tp_dim);
    for (int64_t t = 0; t < sharding.tp; ++t) {
      const Range cut = Chunk(torch.shape[dim], sharding.tp, t);
      const int64_t end = cut.begin + cut.count;
      if (cut.count == 0 || IsWholeBlocks(cut.begin, end, torch.shape[dim], blocks[dim])) continue;
      return CutsBlock(model.canonical().tensors[torch.tensor].name, dim == 0 ? "rows" : "columns",
                       cut.begin, end, blocks[dim])
          .AtRank(std::to_string(t));
    }
  }
  return OkStatus();
}

}  // namespace

Result<Sharding> ShardingOf(const ParallelSpec& spec) {
  Sharding sharding;
  WW_ASSIGN(const std::optional<size_t> kind, ChoiceOption(spec, "kind", kKinds));
  sharding.kind = static_cast<Kind>(kind.value_or(0));
  sharding.shards = spec.SizeOr("dp", 1);
  sharding.replicas = spec.SizeOr("hsdp", 1);
  sharding.tp = spec.SizeOr("tp", 1);
  WW_ASSIGN(const std::optional<int64_t> dim, IntegerOption(spec, "dim", 0));
  WW_ASSIGN(const std::optional<int64_t> align, IntegerOption(spec, "align", 1));
  sharding.dim = dim.value_or(0);
  sharding.align = align.value_or(0);
  WW_FAIL_IF_ERROR(CheckOnlyFor(sharding.kind, sharding.tp > 1, Kind::kFsdp2, "tp"));
  WW_FAIL_IF_ERROR(CheckOnlyFor(sharding.kind, dim.has_value(), Kind::kFsdp2, "dim="));
  WW_FAIL_IF_ERROR(CheckOnlyFor(sharding.kind, align.has_value(), Kind::kFsdp1Orig, "align="));
  return sharding;
}

Result<ModelLayout> Shard(const CanonicalSpace& canonical, std::span<const TorchTensor> tensors,
                          std::string_view family, const Sharding& sharding) {
  WW_ASSIGN(const int64_t world, WorldSize({sharding.replicas, sharding.shards, sharding.tp}));
  WW_ASSIGN(const Cutter cutter, Cutter::Make(canonical, tensors, family, sharding));
  WW_FAIL_IF_ERROR(CheckPieces(cutter.PiecesBound(), world));
  ModelLayout layout{canonical, {}};
  const int64_t in_replica = sharding.shards * sharding.tp;
  for (int64_t rank = 0; rank < world; ++rank) {
    layout.ranks.push_back(rank < in_replica
                               ? cutter.Rank(rank / sharding.tp, rank % sharding.tp)
                               : layout.ranks[static_cast<size_t>(rank % in_replica)]);
  }
  return layout;
}

}  // namespace fsdp

Result<ModelLayout> DeriveFsdp(const Model& model, const ParallelSpec& spec) {
  WW_ASSIGN(const fsdp::Sharding sharding, fsdp::ShardingOf(spec));
  WW_ASSIGN(const int64_t layers, LayersWithMtp(model.config(), spec));
  if (const std::string linear = FirstTensor(model, {Role::kLinearOut});
      sharding.tp > 1 && !linear.empty()) {
    return Fail(BadOption("tp", std::to_string(sharding.tp), "known for linear attention in fsdp")
                    .AtTensor(linear)
                    .Remedy("shard without tp, or send explicit layouts"));
  }
  if (const std::string scale = FirstTensor(model, {Role::kRouterExpertScale});
      sharding.tp > 1 && !scale.empty()) {
    return Fail(BadOption("tp", std::to_string(sharding.tp), "known for these experts in fsdp")
                    .AtTensor(scale)
                    .Remedy("shard without tp, or send explicit layouts"));
  }
  const std::vector<TorchTensor> tensors = TorchTensors(model, layers);
  WW_FAIL_IF_ERROR(fsdp::CheckScales(model, tensors, sharding));
  return fsdp::Shard(model.canonical(), tensors, model.config().family, sharding);
}

}  // namespace weightwire::layout
