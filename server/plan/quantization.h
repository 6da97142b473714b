#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/layout/types.h"
#include "server/plan/plan.h"

/// Blocks of fp8 weights: a box of the weight and the box of its scales. See TensorSpec::block.
namespace weightwire::plan {

/// Whether a copy of `from` elements can make fp8 codes and scales.
bool IsQuantizable(layout::DType from);

/// Whether `transform`, which is not kElements, makes `to` of `from`.
bool CanMake(Transform transform, layout::ScaleRule rule, layout::DType from, layout::DType to);

/// Whether `box` of the weight is made of whole blocks: it begins at one, and it ends at one or, in
/// a partial one, with the weight.
bool IsWholeBlocks(const layout::TensorSpec& weight, const layout::Box& box);
/// What is left of `box` without the blocks that it cuts; nullopt when it has no whole one.
std::optional<layout::Box> WholeBlocksIn(const layout::TensorSpec& weight, layout::Box box);
/// The scales of a box of whole blocks.
layout::Box ScalesOf(const layout::TensorSpec& weight, const layout::Box& box);
/// The elements that share the scales of `box`.
layout::Box ElementsOf(const layout::TensorSpec& weight, const layout::Box& scales);

/// What is wrong with `makes`, `block` and `source_extent`, taken with dtypes and extents that are
/// each well formed; nullopt when a kernel can do it. For slices that come from outside.
std::optional<std::string> QuantizationDefect(const CopyOp& op);

}  // namespace weightwire::plan
