#include "server/wire/addresses.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "server/wire/checks.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

/// Of host and addresses, each text behind its length: 128 bits, by two texts that differ in front.
std::pair<size_t, size_t> DigestOf(const v1::PeerAddress& peer) {
  std::string all;
  const auto add = [&all](const std::string& text) {
    all += std::to_string(text.size()) + ':' + text;
  };
  add(peer.host());
  const std::map<std::string, std::string> sorted(peer.addresses().begin(), peer.addresses().end());
  for (const auto& [transport, address] : sorted) {
    add(transport);
    add(address);
  }
  const std::hash<std::string> hash;
  return {hash(all), hash("and " + all)};
}

/// A protobuf map has no order of its own.
std::vector<v1::PeerAddress*> ByRank(v1::Prepare* prepare) {
  std::map<uint32_t, v1::PeerAddress*> sorted;
  for (auto& [rank, peer] : *prepare->mutable_sources()) sorted.emplace(rank, &peer);
  std::vector<v1::PeerAddress*> peers;
  for (const auto& [rank, peer] : sorted) peers.push_back(peer);
  return peers;
}

}  // namespace

void AddressesTold::Shorten(v1::Prepare* prepare) {
  if (told_.size() > kAddressesToldMax) {
    told_.clear();
    prepare->set_addresses_anew(true);
  }
  for (v1::PeerAddress* peer : ByRank(prepare)) {
    const Digest digest = DigestOf(*peer);
    const auto [known, fresh] = told_.try_emplace(peer->incarnation(), digest);
    if (fresh || std::exchange(known->second, digest) != digest) continue;
    peer->set_as_told(true);
    peer->clear_host();
    peer->clear_addresses();
  }
}

Status AddressesHeard::Complete(v1::Prepare* prepare) {
  if (prepare->addresses_anew()) heard_.clear();
  for (v1::PeerAddress* peer : ByRank(prepare)) {
    if (!peer->as_told()) {
      v1::PeerAddress& heard = heard_[peer->incarnation()];
      heard.set_host(peer->host());
      *heard.mutable_addresses() = peer->addresses();
      continue;
    }
    const auto heard = heard_.find(peer->incarnation());
    if (heard == heard_.end()) {
      return Bad("prepare.sources", "leaves off addresses of agent " +
                                        std::to_string(peer->agent()) +
                                        ", which the session was never told");
    }
    peer->clear_as_told();
    peer->set_host(heard->second.host());
    *peer->mutable_addresses() = heard->second.addresses();
  }
  return CheckCount("prepare.sources", heard_.size(), kAddressesToldMax + kRanksMax);
}

}  // namespace weightwire::wire
