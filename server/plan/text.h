#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "server/layout/types.h"
#include "server/plan/plan.h"

/// How messages of this room spell things.
namespace weightwire::plan {

std::string ShapeText(std::span<const int64_t> shape);  ///< "[64, 32]"
std::string BoxText(const layout::Box& box);            ///< "[0:64, 8:16]", "[]" for a scalar
std::string RankText(Side side, uint32_t rank);         ///< "source/3"

}  // namespace weightwire::plan
