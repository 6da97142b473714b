#pragma once

#include <cstdint>
#include <string>

namespace weightwire::memory {

/// Why a process of this user cannot use the agent's Unix socket at `path`, when users are the
/// reason; both uids are named. Empty: users are not the reason. Takes up to a second when another
/// user listens there.
std::string UidRefusal(const std::string& path);
/// What to do about it where the process that is refused has `uid`.
std::string UidRefusalRemedy(uint32_t uid);

}  // namespace weightwire::memory
