#pragma once

#include <string>

namespace weightwire::memory {

/// Why a process of this user cannot use the agent's Unix socket at `path`, when users are the
/// reason; both uids are named. Empty: users are not the reason. Takes up to a second when another
/// user listens there.
std::string UidWall(const std::string& path);
/// What to do about it.
std::string UidWallRemedy();

}  // namespace weightwire::memory
