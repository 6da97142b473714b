#include "server/transport/address.h"

#include <charconv>
#include <cstdint>

namespace weightwire::transport {

Result<std::pair<std::string, uint16_t>> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  uint16_t port = 0;
  if (colon != std::string::npos && colon > 0 && colon + 1 < address.size()) {
    const char* end = address.data() + address.size();
    const auto parsed = std::from_chars(address.data() + colon + 1, end, port);
    std::string host = address.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
      host = host.substr(1, host.size() - 2);
    }
    if (parsed.ec == std::errc() && parsed.ptr == end) return std::pair(host, port);
  }
  return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
              "\"" + address + "\" is no \"host:port\"");
}

std::string JoinAddress(const std::string& host, uint16_t port) {
  const bool is_v6 = host.find(':') != std::string::npos;
  return (is_v6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

}  // namespace weightwire::transport
