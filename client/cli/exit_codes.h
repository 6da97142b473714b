#pragma once

#include "server/base/status.h"

namespace weightwire::cli {

/// What wwctl's process ends with, besides 0: part of what scripts rely on.
constexpr int kExitFound = 1;  ///< doctor's, when there is something to mend
constexpr int kExitUsage = 2;
constexpr int kExitDeclined = 3;  ///< asked at the terminal, the person did not say yes
constexpr int ExitCode(Reason reason) { return 64 + static_cast<int>(reason); }

}  // namespace weightwire::cli
