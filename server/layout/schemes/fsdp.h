#pragma once

#include <span>
#include <string_view>

#include "server/layout/scheme.h"
#include "server/layout/schemes/fsdp_tensors.h"

namespace weightwire::layout::fsdp {

enum class Kind { kFsdp2, kFsdp1, kFsdp1Orig, kZero3 };

/// The words of a spec; what they mean is in fsdp.cc.
struct Sharding {
  Kind kind = Kind::kFsdp2;
  int64_t shards = 1;
  int64_t replicas = 1;
  int64_t tp = 1;
  int64_t dim = 0;
  int64_t align = 0;  ///< elements; 0: 16 bytes
};
/// Errors as in LayoutFromScheme.
Result<Sharding> ShardingOf(const ParallelSpec& spec);

/// What all ranks hold of `tensors`. `family` is needed for flat parameters only. Errors as in
/// LayoutFromScheme.
Result<ModelLayout> Shard(const CanonicalSpace& canonical, std::span<const TorchTensor> tensors,
                          std::string_view family, const Sharding& sharding);

}  // namespace weightwire::layout::fsdp
