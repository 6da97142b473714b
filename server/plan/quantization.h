#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/layout/types.h"
#include "server/plan/plan.h"

/// Blocks of quantized weights: a box of the weight and the box of its scales. See
/// TensorSpec::block.
///
/// Codes of four bits lie several in one element of their tensor (TensorSpec::packed), which has
/// another name than what they are made of. Copies that make them say in `source_extent` what they
/// read, as copies of scales do; their `block` counts elements of the packed tensor, so that it
/// says how they are cut wherever they are passed on. That of their scales counts what is read.
namespace weightwire::plan {

/// Whether a copy of `from` elements can make codes and scales.
bool IsQuantizable(layout::DType from);

/// Whether `transform`, which is not kElements, makes `to` of `from`.
bool CanMake(Transform transform, layout::ScaleRule rule, layout::DType from, layout::DType to);

/// The weight that a packed one is made of: its name, shape and block before it was packed. Every
/// other weight is made of one like itself.
layout::TensorSpec Unpacked(const layout::TensorSpec& weight);
/// What a box of a packed tensor holds, and what holds a box of whole groups.
layout::Box Unpacked(const layout::TensorSpec& weight, layout::Box packed);
layout::Box Packed(const layout::TensorSpec& weight, layout::Box box);

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
