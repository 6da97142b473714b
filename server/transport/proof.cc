#include "server/transport/proof.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/random.h>

#include <algorithm>
#include <vector>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

Proof Hmac(std::span<const uint8_t> key, std::span<const std::byte> message) {
  Proof out;
  const auto* data = reinterpret_cast<const unsigned char*>(message.data());
  WW_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), data, message.size(),
                out.data(), nullptr) != nullptr);
  return out;
}

/// The label comes first and ends with a zero byte, so that no label begins another one's message.
Proof Labelled(std::span<const uint8_t> key, std::string_view label,
               std::span<const std::byte> message) {
  std::vector<std::byte> whole(label.size() + 1 + message.size());
  std::ranges::copy(std::as_bytes(std::span(label)), whole.begin());
  std::ranges::copy(message, whole.begin() + static_cast<std::ptrdiff_t>(label.size()) + 1);
  return Hmac(key, whole);
}

}  // namespace

Nonce RandomNonce() {
  Nonce nonce;
  WW_CHECK(getrandom(nonce.data(), nonce.size(), 0) == static_cast<ssize_t>(nonce.size()));
  return nonce;
}

TicketName NameOf(const Ticket& ticket) {
  const Proof whole = Labelled(ticket, "weightwire ticket name", {});
  TicketName name;
  std::copy_n(whole.begin(), name.size(), name.begin());
  return name;
}

TicketName NameIn(const CallerHello& hello) {
  return hello.proves() ? hello.shown : NameOf(hello.shown);
}

SessionSecrets SecretsOf(const Ticket& ticket, std::span<const std::byte> first,
                         std::span<const std::byte> reply, const Nonce& nonce) {
  std::vector<std::byte> said(8 + first.size() + reply.size() + nonce.size());
  LittleEndianWriter writer(said);
  writer.Put(uint64_t{first.size()});
  for (std::byte byte : first) writer.Put(static_cast<uint8_t>(byte));
  for (std::byte byte : reply) writer.Put(static_cast<uint8_t>(byte));
  writer.PutBytes(nonce);
  return {Labelled(ticket, "weightwire callee", said), Labelled(ticket, "weightwire caller", said),
          Labelled(ticket, "weightwire session", said)};
}

Proof KeyedProof(const Proof& key, std::string_view label, std::span<const std::byte> message) {
  return Labelled(key, label, message);
}

bool SameProof(const Proof& a, const Proof& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace weightwire::transport
