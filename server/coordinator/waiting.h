#pragma once

#include <string>
#include <vector>

#include "server/coordinator/scheduling.h"

/// What everyone waits for, in lines for people.
namespace weightwire::coordinator {

inline constexpr size_t kLinesJoined = 4;
/// The first kLinesJoined, and how many more there are, with `more` that are not in `lines`.
std::string Joined(const std::vector<std::string>& lines, size_t more = 0);
/// How long the member's agent has given no sign of life; 0 while that is no reason to worry.
double SilentSeconds(const Shared& shared, const epoch::Member& member);
/// "engine-a/0: silent", of ranks whose agents have said nothing for a while, or are cut off.
std::vector<std::string> SilentLines(const Shared& shared);
/// What agents say of processes of their hosts, ranks that are still theirs only.
std::vector<TroubleStatus> TroublesOf(const Shared& shared);
/// What groups lack. One that is gone altogether counts only where somebody waits for it.
std::vector<std::string> MissingLines(const Shared& shared, control::GroupRole role, bool gone_too);
/// "1 of 2 engines are complete; engine-b/0: register".
std::string WaitingEnginesLine(const Shared& shared, size_t wanted);

}  // namespace weightwire::coordinator
