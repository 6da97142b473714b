#pragma once

#include <cstdint>
#include <vector>

#include "server/memory/region.h"
#include "server/plan/plan.h"
#include "server/transfer/transfer.h"

/// The shapes of a model of 0.5 B parameters (290 tensors, 988 MB in bf16), held by a trainer with
/// TP2 × PP2 and moved to one rank that holds everything.
namespace weightwire::bench {

inline constexpr uint32_t kSourceRanks = 4;

struct SmallModel {
  plan::TransferPlan plan;
  std::vector<std::vector<uint64_t>> source_tensor_bytes;  ///< by rank, by tensor
  std::vector<uint64_t> target_tensor_bytes;
};
SmallModel MakeSmallModel();

/// One region with all tensors, each begun at a multiple of 64.
transfer::Binding Allocate(const char* name, const std::vector<uint64_t>& tensor_bytes);

/// Element i of canonical tensor t is a function of (t, i): so that the target can be checked
/// alone.
void FillSource(const SmallModel& model, uint32_t rank, const transfer::Binding& binding);
/// Number of wrong elements.
int64_t CheckTarget(const SmallModel& model, const transfer::Binding& binding);

}  // namespace weightwire::bench
