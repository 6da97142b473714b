#include "server/wire/checks.h"

#include <algorithm>
#include <cmath>

#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

std::string Text(std::string_view text) { return std::string(text); }

/// Bytes of the well-formed UTF-8 sequence at the start of `text`; 0 when there is none.
size_t SequenceBytes(std::string_view text) {
  auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  auto continues = [&](size_t i, uint8_t low, uint8_t high) {
    return i < text.size() && at(i) >= low && at(i) <= high;
  };
  const uint8_t first = at(0);
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first <= 0xDF) return continues(1, 0x80, 0xBF) ? 2 : 0;
  if (first >= 0xE0 && first <= 0xEF) {
    const uint8_t low = first == 0xE0 ? 0xA0 : 0x80;
    const uint8_t high = first == 0xED ? 0x9F : 0xBF;
    return continues(1, low, high) && continues(2, 0x80, 0xBF) ? 3 : 0;
  }
  if (first >= 0xF0 && first <= 0xF4) {
    const uint8_t low = first == 0xF0 ? 0x90 : 0x80;
    const uint8_t high = first == 0xF4 ? 0x8F : 0xBF;
    const bool whole =
        continues(1, low, high) && continues(2, 0x80, 0xBF) && continues(3, 0x80, 0xBF);
    return whole ? 4 : 0;
  }
  return 0;
}

}  // namespace

Status Bad(std::string_view field, std::string_view what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, Text(field) + ": " + Text(what));
}

Status CheckVersion(std::string_view field, uint64_t version) {
  if (version == 0) return Bad(field, "must not be 0");
  if (version <= kVersionMax) return OkStatus();
  return Bad(field,
             std::to_string(version) + " is over the bound of " + std::to_string(kVersionMax))
      .Remedy("number versions from 1 on");
}

Status UnknownEnum(std::string_view field, int number) {
  return Status(Code::kInvalidArgument, Reason::kUnknownEnum,
                Text(field) + ": value " + std::to_string(number) + " is not known here")
      .Remedy("use a value of the proto files of this version, or upgrade the other side");
}

Status TooLarge(std::string_view field, size_t size, size_t limit) {
  return Status(
      Code::kInvalidArgument, Reason::kMessageTooLarge,
      Text(field) + ": " + std::to_string(size) + " is over the limit of " + std::to_string(limit));
}

Status CheckText(std::string_view field, std::string_view text, size_t bytes_max) {
  return CheckCount(field, text.size(), bytes_max);
}

Status CheckId(std::string_view field, std::string_view text) {
  if (text.empty()) return Bad(field, "must not be empty");
  WW_RETURN_IF_ERROR(CheckText(field, text, kIdBytesMax));
  auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (!std::all_of(text.begin(), text.end(), allowed)) {
    return Bad(field, "may hold only letters, digits, '.', '_' and '-'");
  }
  return OkStatus();
}

Status CheckCount(std::string_view field, size_t count, size_t limit) {
  return count > limit ? TooLarge(field, count, limit) : OkStatus();
}

Status CheckSeconds(std::string_view field, double seconds) {
  if (std::isfinite(seconds) && seconds >= 0) return OkStatus();
  return Bad(field, "must be a finite number of seconds, at least 0");
}

Result<std::array<uint8_t, 16>> TraceIdFromProto(std::string_view field, std::string_view bytes) {
  std::array<uint8_t, 16> out{};
  if (bytes.empty()) return out;
  if (bytes.size() != out.size()) return Fail(Bad(field, "must have 16 bytes, or none"));
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

std::string TraceIdToProto(const std::array<uint8_t, 16>& trace_id) {
  if (trace_id == std::array<uint8_t, 16>{}) return {};
  return std::string(trace_id.begin(), trace_id.end());
}

Result<Ticket> TicketFromProto(std::string_view field, std::string_view bytes) {
  Ticket out{};
  if (bytes.size() != out.size()) return Fail(Bad(field, "must have 16 bytes"));
  std::copy(bytes.begin(), bytes.end(), out.begin());
  return out;
}

std::string TicketToProto(const Ticket& ticket) {
  return std::string(ticket.begin(), ticket.end());
}

Result<AddressMap> AddressesFromProto(
    std::string_view field, const google::protobuf::Map<std::string, std::string>& addresses) {
  WW_FAIL_IF_ERROR(CheckCount(field, addresses.size(), kAddressesMax));
  AddressMap out;
  for (const auto& [transport, address] : addresses) {
    WW_FAIL_IF_ERROR(CheckId(Text(field) + " key", transport));
    WW_FAIL_IF_ERROR(CheckText(Text(field) + "[" + transport + "]", address, kAddressBytesMax));
    out.emplace(transport, address);
  }
  return out;
}

std::string CleanText(std::string_view text, size_t bytes_max) {
  static constexpr std::string_view kCut = "…";
  std::string out;
  size_t cut_at = 0;  // the last boundary that leaves room for kCut
  while (!text.empty()) {
    const size_t bytes = SequenceBytes(text);
    const std::string_view next = bytes == 0 ? std::string_view("?") : text.substr(0, bytes);
    if (out.size() + next.size() > bytes_max) {
      out.resize(cut_at);
      if (out.size() + kCut.size() <= bytes_max) out.append(kCut);
      return out;
    }
    out.append(next);
    text.remove_prefix(std::max<size_t>(bytes, 1));
    if (out.size() + kCut.size() <= bytes_max) cut_at = out.size();
  }
  return out;
}

}  // namespace weightwire::wire
