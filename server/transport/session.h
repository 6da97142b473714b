#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "server/base/ids.h"
#include "server/base/status.h"

namespace weightwire::transport {

inline constexpr uint16_t kProtocolMin = 1;
inline constexpr uint16_t kProtocolMax = 2;
/// From this one on a caller names its ticket, and both sides prove that they have it (proof.h).
/// Before it a caller shows the ticket itself.
inline constexpr uint16_t kProtocolProof = 2;

/// A bit of `features`, which both sides' proofs cover; bits that a build does not know it ignores.
/// Every frame and payload of the session ends with a MAC (frame_mac.h), both ways.
inline constexpr uint64_t kFeatureMac = 1;
/// A caller's, for whoever serves it: it understands that a source waits for its own sender.
inline constexpr uint64_t kFeatureHearsWaiting = 2;
/// A caller's: it can make a slot of what changed since earlier versions.
inline constexpr uint64_t kFeatureTakesDelta = 4;
/// A caller's: what it reads comes over a network, or under a rate limit of its own.
inline constexpr uint64_t kFeatureNarrowRoad = 8;

/// What a caller knows of a session that it opens.
struct Hello {
  uint16_t protocol_min = kProtocolMax;
  uint16_t protocol_max = kProtocolMax;
  uint64_t features = 0;  ///< that the caller asks for
  Incarnation caller{};   ///< of the calling agent
  Incarnation callee{};   ///< of the agent that the caller means to reach
  Ticket ticket{};        ///< minted by the coordinator for this pair; a secret of both
  friend bool operator==(const Hello&, const Hello&) = default;
};

/// Names a ticket without telling it.
using TicketName = std::array<uint8_t, 16>;
/// An HMAC of what was said so far.
using Proof = std::array<uint8_t, 32>;
/// Random bytes, used once.
using Nonce = std::array<uint8_t, 16>;

/// What a caller says first on every data-plane session.
struct CallerHello {
  uint16_t protocol_min = kProtocolMax;
  uint16_t protocol_max = kProtocolMax;
  uint64_t features = 0;
  Incarnation caller{};
  Incarnation callee{};
  std::array<uint8_t, 16> shown{};  ///< the ticket's name; before kProtocolProof the ticket
  Nonce nonce{};
  bool proves() const { return protocol_min >= kProtocolProof; }
  friend bool operator==(const CallerHello&, const CallerHello&) = default;
};
inline constexpr size_t kCallerHelloBytes = 80;

/// Fixed little-endian form: magic "WWDP", sizes and a checksum included.
std::array<std::byte, kCallerHelloBytes> EncodeCallerHello(const CallerHello& hello);
///   kInvalidArgument / kInvalidRequest  wrong size, magic or checksum
///   kInvalidArgument / kUnknownEnum     (reply) a code or reason that this build does not know
Result<CallerHello> DecodeCallerHello(std::span<const std::byte> bytes);

/// What the callee answers first: the chosen protocol, or why not.
struct CalleeReply {
  uint16_t protocol = 0;
  uint64_t features = 0;
  Code code = Code::kOk;
  Reason reason = Reason::kNone;
  friend bool operator==(const CalleeReply&, const CalleeReply&) = default;
};
inline constexpr size_t kCalleeReplyBytes = 48;
std::array<std::byte, kCalleeReplyBytes> EncodeCalleeReply(const CalleeReply& reply);
Result<CalleeReply> DecodeCalleeReply(std::span<const std::byte> bytes);

/// What follows a reply that agrees to kProtocolProof or later: the callee's proof.
struct CalleeProof {
  Nonce nonce{};
  Proof proof{};
  friend bool operator==(const CalleeProof&, const CalleeProof&) = default;
};
inline constexpr size_t kCalleeProofBytes = 64;
std::array<std::byte, kCalleeProofBytes> EncodeCalleeProof(const CalleeProof& callee_proof);
Result<CalleeProof> DecodeCalleeProof(std::span<const std::byte> bytes);

/// What the caller answers then: its own.
inline constexpr size_t kCallerProofBytes = 48;
std::array<std::byte, kCallerProofBytes> EncodeCallerProof(const Proof& proof);
Result<Proof> DecodeCallerProof(std::span<const std::byte> bytes);

/// Highest version both sides speak. kFailedPrecondition / kProtocolVersion naming both ranges.
Result<uint16_t> ChooseProtocol(uint16_t peer_min, uint16_t peer_max);

}  // namespace weightwire::transport
