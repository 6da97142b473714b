#pragma once

#include <string>
#include <string_view>

#include "server/layout/families/family.h"

namespace weightwire::layout {

/// Puts behind each local tensor of fp8 weights the one of its scales: <name>_scale_inv, fp32, with
/// one element for each block of the local tensor. Element (i, j) of it is the scale of the weights
/// from local row i · rows and column j · columns on, whatever has been cut and fused.
///
/// The local tensors of weights are row-major matrices, or stacks of them, as engines hold them.
///
///   kInvalidArgument / kShapeMismatch  a cut runs through a block, or what is fused does not begin
///                                      at one: names the weight, the cut and the block
///   kInvalidArgument / kDtypeMismatch  what is fused is quantized in part: names both weights
Status AddScaleTensors(const Model& model, RankLayout& rank);

/// How a cut that runs through a block is refused; `what` is "rows" or "columns".
Status CutsBlock(const std::string& weight, std::string_view what, int64_t begin, int64_t end,
                 int64_t block);

}  // namespace weightwire::layout
