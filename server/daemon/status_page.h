#pragma once

#include <string_view>

namespace weightwire::daemon {

/// status_page.html as it is in the tree.
extern const std::string_view kStatusPage;

}  // namespace weightwire::daemon
