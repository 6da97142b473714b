#pragma once

#include <string_view>
#include <vector>

#include "server/base/status.h"

namespace weightwire::layout {

/// The words that a parallel spec of one scheme may have.
struct SchemeWords {
  std::vector<std::string_view> sizes;    ///< written with their number: tp2
  std::vector<std::string_view> options;  ///< written key=value, flags as the key alone
};
///   kInvalidArgument / kUnknownScheme  no such scheme; names the known ones
Result<SchemeWords> WordsOf(std::string_view scheme);

}  // namespace weightwire::layout
