#pragma once

#include <string>
#include <string_view>

#include "server/epoch/messages.h"

namespace weightwire::coordinator {

/// A `waiting_for`, for people: "engine-a/0: staged" is "engine-a/0 still receiving".
std::string WaitingInWords(std::string_view waiting);
/// What a member reports of a phase, for people: "staged" is "received".
std::string_view ReportInWords(std::string_view report);
/// Of an engine, by the name that the API has for it: "dirty" is "incomplete (needs refill)".
std::string_view StateInWords(std::string_view state);
/// "publish", "fill" or "rollback".
std::string_view KindInWords(epoch::Kind kind);

}  // namespace weightwire::coordinator
