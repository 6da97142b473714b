#pragma once

#include "server/layout/types.h"

namespace weightwire::plan {

/// Whether `from` can become `to` on the way: equal, or both among bf16, f16 and f32.
constexpr bool CastKnown(layout::DType from, layout::DType to) {
  const auto is_float = [](layout::DType dtype) {
    return dtype == layout::DType::kBF16 || dtype == layout::DType::kF16 ||
           dtype == layout::DType::kF32;
  };
  return from == to || (is_float(from) && is_float(to));
}

}  // namespace weightwire::plan
