#pragma once

#include <cstdint>

#include "server/layout/types.h"
#include "server/plan/plan.h"

namespace weightwire::agent {

/// Checks that a slice is the one asked for and can run against the memory of `layout`, this rank's
/// agreed layout: a plan comes from outside and must not index memory on trust. Every op stays
/// inside its tensor on our side, has the tensor's dtype there, and a cast or quantization that
/// exists; strides of the far side are well formed; stream sizes add up; what the rank gathers is
/// of floats and stays inside its memory on both ways. Pure; O(ops).
///
///   kInvalidArgument / kInvalidRequest  another plan, side or rank; malformed op; sizes disagree
///   kInvalidArgument / kTensorMissing   an op names a tensor that the layout does not have
///   kInvalidArgument / kShapeMismatch   an op leaves its tensor's storage
///   kInvalidArgument / kShapeOverflow   a size does not fit
///   kInvalidArgument / kDtypeMismatch   dtype of our side differs, or no such cast
Status CheckSlice(const plan::RankSlice& slice, PlanId plan, plan::Side side, uint32_t rank,
                  const layout::RankLayout& layout);

}  // namespace weightwire::agent
