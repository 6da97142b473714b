#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include <google/protobuf/map.h>

#include "server/base/ids.h"
#include "server/base/status.h"

/// Checks that conversions share. `field` is the path that the failure names.
namespace weightwire::wire {

/// kInvalidArgument / kInvalidRequest: "`field`: `what`".
Status Bad(std::string_view field, std::string_view what);
/// kInvalidArgument / kUnknownEnum naming field and number.
Status UnknownEnum(std::string_view field, int number);
/// kInvalidArgument / kMessageTooLarge naming field, size and limit.
Status TooLarge(std::string_view field, size_t size, size_t limit);

/// Of what a trainer publishes: 1 to kVersionMax.
Status CheckVersion(std::string_view field, uint64_t version);
/// Text of at most `bytes_max`.
Status CheckText(std::string_view field, std::string_view text, size_t bytes_max);
/// 1 to kIdBytesMax of [A-Za-z0-9._-].
Status CheckId(std::string_view field, std::string_view text);
Status CheckCount(std::string_view field, size_t count, size_t limit);
/// Finite and at least 0: one NaN would stay in a metric's sum for good.
Status CheckSeconds(std::string_view field, double seconds);

/// 16 bytes; none at all is 16 zeros.
Result<std::array<uint8_t, 16>> TraceIdFromProto(std::string_view field, std::string_view bytes);
std::string TraceIdToProto(const std::array<uint8_t, 16>& trace_id);
/// Exactly 16 bytes.
Result<Ticket> TicketFromProto(std::string_view field, std::string_view bytes);
std::string TicketToProto(const Ticket& ticket);

using AddressMap = std::map<std::string, std::string>;
/// At most kAddressesMax transports with an address each.
Result<AddressMap> AddressesFromProto(
    std::string_view field, const google::protobuf::Map<std::string, std::string>& addresses);

/// Fits `bytes_max` and is valid UTF-8: a text that would make the receiver refuse the message is
/// cut, and bytes that are not UTF-8 become '?'.
std::string CleanText(std::string_view text, size_t bytes_max);

}  // namespace weightwire::wire
