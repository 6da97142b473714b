#pragma once

#include <string_view>

namespace weightwire::daemon {

/// The git revision that this is built from, with "-dirty" where the tree differed from it;
/// "unknown" without a repository.
std::string_view Revision();

}  // namespace weightwire::daemon
