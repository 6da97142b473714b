#include "server/transport/address.h"

#include <charconv>
#include <cstdint>

namespace weightwire::transport {
namespace {

constexpr size_t kGpusMax = 15;

/// `visit` gets each part of `text` between separators.
template <typename Visit>
void Split(std::string_view text, char separator, Visit&& visit) {
  while (!text.empty()) {
    const size_t end = text.find(separator);
    visit(text.substr(0, end));
    text = end == text.npos ? std::string_view() : text.substr(end + 1);
  }
}

}  // namespace

AddressFacts SplitFacts(std::string_view text) {
  AddressFacts split;
  const size_t end = text.find('?');
  split.address = text.substr(0, end);
  if (end == text.npos) return split;
  Split(text.substr(end + 1), '&', [&](std::string_view fact) {
    const size_t equals = fact.find('=');
    if (equals == fact.npos || equals + 1 == fact.size()) return;
    split.facts[std::string(fact.substr(0, equals))] = fact.substr(equals + 1);
  });
  return split;
}

std::string JoinFacts(std::string address,
                      const std::vector<std::pair<std::string, std::string>>& facts) {
  char separator = '?';
  for (const auto& [name, value] : facts) {
    if (value.empty()) continue;
    address += separator + name + "=" + value;
    separator = '&';
  }
  return address;
}

std::string JoinGpus(const std::vector<std::string>& gpus) {
  std::string text;
  for (size_t i = 0; i < gpus.size() && i < kGpusMax; ++i) text += (i == 0 ? "" : ",") + gpus[i];
  return text;
}

std::vector<std::string> SplitGpus(std::string_view value) {
  std::vector<std::string> gpus;
  Split(value, ',', [&](std::string_view gpu) { gpus.emplace_back(gpu); });
  return gpus;
}

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
