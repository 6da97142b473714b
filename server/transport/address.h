#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/status.h"

namespace weightwire::transport {

/// "host:port" or "[v6]:port" as (host, port).
///   kInvalidArgument / kConfigInvalid  no port, or one that is no number up to 65535
Result<std::pair<std::string, uint16_t>> SplitAddress(const std::string& address);
std::string JoinAddress(const std::string& host, uint16_t port);

/// An address with facts behind it, by which a caller knows before it calls whether it could use
/// the session: "socket?name=value&name=value".
struct AddressFacts {
  std::string address;
  std::map<std::string, std::string, std::less<>> facts;  ///< without those that have no value
};
/// Total.
AddressFacts SplitFacts(std::string_view text);
/// Facts of an empty value are left out.
std::string JoinFacts(std::string address,
                      const std::vector<std::pair<std::string, std::string>>& facts);

/// GPUs as the value of a fact: the device::ShortNames of at most 15, so that the whole fits what
/// the wire takes (256 bytes).
std::string JoinGpus(const std::vector<std::string>& gpus);
std::vector<std::string> SplitGpus(std::string_view value);

}  // namespace weightwire::transport
