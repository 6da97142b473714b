#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "server/transport/session.h"

/// What is made of a ticket, so that it need not travel: HMAC-SHA256 by the ticket's bytes, with a
/// label for each use.
namespace weightwire::transport {

Nonce RandomNonce();

/// The same on both sides; the ticket cannot be found from it.
TicketName NameOf(const Ticket& ticket);
/// Of the ticket that a caller speaks of, by its name or, before kProtocolProof, in the open.
TicketName NameIn(const CallerHello& hello);

/// What two sides that share a ticket, and have heard each other so far, alone can make.
struct SessionSecrets {
  Proof of_callee{};
  Proof of_caller{};
  Proof key{};  ///< of what follows on the session
};
/// `first` is the caller's whole first message, `reply` the encoded CalleeReply that followed it
/// and `nonce` the callee's. Nobody chooses all of them, so that no session's secrets come again.
SessionSecrets SecretsOf(const Ticket& ticket, std::span<const std::byte> first,
                         std::span<const std::byte> reply, const Nonce& nonce);

/// An HMAC under a session's key.
Proof KeyedProof(const Proof& key, std::string_view label, std::span<const std::byte> message);

/// In a time that does not tell where they differ.
bool SameProof(const Proof& a, const Proof& b);

}  // namespace weightwire::transport
