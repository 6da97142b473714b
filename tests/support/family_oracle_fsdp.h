#pragma once

#include "tests/support/family_oracle_model.h"

namespace weightwire::family_oracle {

/// FSDP2, with replicas (HSDP) and tensor parallelism, or DeepSpeed ZeRO-3.
struct FsdpShape {
  int64_t dp = 1, hsdp = 1, tp = 1;
  int64_t dim = 0;  ///< tensors of more dimensions are cut along it, others along 0
  bool zero3 = false;
};

/// What every rank holds of `hf`, by rank.
std::vector<Tensors> FsdpRanks(const Tensors& hf, const FsdpShape& shape);

}  // namespace weightwire::family_oracle
