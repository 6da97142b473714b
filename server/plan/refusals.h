#pragma once

#include <cstdint>
#include <string>

#include "server/base/status.h"
#include "server/layout/types.h"
#include "server/plan/owners.h"

/// How BuildPlan says no. Each names the tensor; ranks are those of source or target.
namespace weightwire::plan {

Status OtherShape(const layout::TensorSpec& tensor, const layout::Shape& at_source);
/// `source` and `target`: all tensors of the two sides.
Status NoSuchTensor(const layout::TensorSpec& tensor, uint32_t target_rank,
                    const layout::CanonicalSpace& source, const layout::CanonicalSpace& target);
Status NoCast(const layout::TensorSpec& tensor, uint32_t source_rank, layout::DType from,
              uint32_t target_rank, layout::DType to);
/// Scales of weights in `from`, in a dtype in which they are not made.
Status NoScales(const layout::TensorSpec& tensor, uint32_t source_rank, layout::DType from,
                uint32_t target_rank, layout::DType to);
/// The owners of `index` do not cover `box`.
Status Unowned(const layout::TensorSpec& tensor, uint32_t target_rank, const layout::Box& box,
               const OwnerIndex& index);

/// The target's `box` is not whole blocks.
Status CutsBlocks(const layout::TensorSpec& weight, uint32_t target_rank, const layout::Box& box);
/// Codes of `weight` depend on the largest magnitude of all of it.
Status NeedsWholeTensor(const layout::TensorSpec& weight);
/// Both sides hold it quantized, with scales by different rules.
Status OtherRule(const layout::TensorSpec& weight);
/// The source holds scales beside a weight that is not quantized.
Status HasScales(const layout::TensorSpec& weight, const std::string& scales);
/// The target rank holds `box` of codes without their scales in `partner`, or the other way round.
Status LacksPartner(const layout::TensorSpec& tensor, uint32_t target_rank, const layout::Box& box,
                    const std::string& partner);

}  // namespace weightwire::plan
