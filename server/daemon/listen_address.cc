#include "server/daemon/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>

namespace weightwire::daemon {

Result<HostPort> ParseHostPort(std::string_view address) {
  auto bad = [&](const char* what) {
    return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                       '"' + std::string(address) + "\": " + what)
                    .Remedy("write host:port, for example 127.0.0.1:7411 or [::1]:0"));
  };
  const size_t colon = address.rfind(':');
  if (colon == std::string_view::npos) return bad("has no port");
  std::string_view host = address.substr(0, colon);
  const std::string_view port = address.substr(colon + 1);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return bad("an IPv6 address needs brackets");
  }
  if (host.empty()) return bad("has no host");
  HostPort out;
  out.host = std::string(host);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), out.port);
  if (error != std::errc() || end != port.data() + port.size()) return bad("is no port number");
  return out;
}

bool IsLoopback(std::string_view host) {
  const std::string text(host);
  if (text == "localhost") return true;
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return inet_pton(AF_INET6, text.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

}  // namespace weightwire::daemon
