#include "server/rpc/trace.h"

#include <algorithm>

namespace weightwire::rpc {
namespace {

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::optional<TraceId> ParseTraceparent(std::string_view header) {
  // "00-" 32 hex digits "-" 16 hex digits "-" 2 hex digits
  if (header.size() != 55 || header.substr(0, 3) != "00-" || header[35] != '-' ||
      header[52] != '-') {
    return std::nullopt;
  }
  TraceId out{};
  for (size_t i = 0; i < out.size(); ++i) {
    const int high = HexDigit(header[3 + 2 * i]);
    const int low = HexDigit(header[4 + 2 * i]);
    if (high < 0 || low < 0) return std::nullopt;
    out[i] = static_cast<uint8_t>(high * 16 + low);
  }
  if (out == TraceId{}) return std::nullopt;
  return out;
}

std::string TraceHex(const TraceId& trace_id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (uint8_t byte : trace_id) {
    out.push_back(kDigits[byte >> 4]);
    out.push_back(kDigits[byte & 15]);
  }
  return out;
}

std::string TraceparentOf(const TraceId& trace_id) {
  const std::string hex = TraceHex(trace_id);
  const std::string parent =
      hex.substr(0, 16) == std::string(16, '0') ? hex.substr(16) : hex.substr(0, 16);
  return "00-" + hex + "-" + parent + "-01";
}

}  // namespace weightwire::rpc
