#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace weightwire::rpc {

using TraceId = std::array<uint8_t, 16>;

/// The trace id of a W3C `traceparent` header (version 00); nullopt when it is malformed or zero.
std::optional<TraceId> ParseTraceparent(std::string_view header);
/// A `traceparent` of version 00 for a call of this trace, sampled; its parent id is the trace's
/// first half, because calls are no spans of their own here.
std::string TraceparentOf(const TraceId& trace_id);
/// 32 lower-case hex digits.
std::string TraceHex(const TraceId& trace_id);

}  // namespace weightwire::rpc
