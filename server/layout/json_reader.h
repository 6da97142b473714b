#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "server/base/status.h"

/// Reads JSON from outside without exceptions. Every failure is kInvalidArgument / kInvalidRequest.
namespace weightwire::layout {

using Json = nlohmann::json;

/// An object; fails for anything else, naming line and column, and for text over 64 MiB. NaN,
/// Infinity and -Infinity are read as Python does, as numbers that are no integers.
Result<Json> ParseObject(std::string_view text, std::string_view what);

/// The member `key` as an integer that fits int64; fails when it is absent or something else.
Result<int64_t> RequiredInteger(const Json& object, const char* key);
/// nullopt when `key` is absent or null.
Result<std::optional<int64_t>> OptionalInteger(const Json& object, const char* key);
Result<std::optional<bool>> OptionalBool(const Json& object, const char* key);
Result<std::optional<std::string>> OptionalString(const Json& object, const char* key);
Result<std::string> RequiredString(const Json& object, const char* key);

/// `value` as an integer that fits int64.
std::optional<int64_t> AsInteger(const Json& value);

}  // namespace weightwire::layout
