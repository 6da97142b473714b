#pragma once

#include <string>

namespace weightwire::daemon {

/// Equal for two processes exactly when they can share memory over an abstract Unix socket: the
/// same boot of the same kernel (boot_id), network namespace and IPC namespace (inode numbers).
/// "boot-id/net:[…]/ipc:[…]"; what cannot be read is "?" with the process id, equal to nobody's.
std::string HostIdentity();

}  // namespace weightwire::daemon
