#pragma once

#include <cstdint>
#include <string>

namespace weightwire {

/// "988.1 MB", "14.0 GB": decimal units, as network rates are given.
std::string BytesText(int64_t bytes);

}  // namespace weightwire
