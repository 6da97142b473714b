#pragma once

#include <optional>
#include <string_view>

#include "server/layout/types.h"

namespace weightwire::layout {

/// torch's spelling without "torch.", as config.json and recorded loaders have it: "bfloat16",
/// "float8_e4m3fn", …; nullopt for any other.
std::optional<DType> DTypeFromTorchName(std::string_view name);

}  // namespace weightwire::layout
