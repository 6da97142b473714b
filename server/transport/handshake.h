#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

#include "server/metrics/metrics.h"
#include "server/transport/proof.h"
#include "server/transport/transport.h"

/// How a session is opened, whatever carries the bytes:
///
///   caller → callee   CallerHello, which names the ticket
///   callee → caller   CalleeReply and CalleeProof: the callee has the ticket (or a refusal)
///   caller → callee   Proof: so has the caller
///   callee → caller   CalleeReply: the session is open
///
/// A caller of protocol 1 shows its ticket and is answered at once; the Handler decides whether
/// that will do.
namespace weightwire::transport {

/// What the caller makes of an answer: OK, or the peer's code and reason.
Status StatusOf(const CalleeReply& reply);
/// Counts a session that was not opened. `check`: what a caller without the ticket failed, as the
/// label of auth_failures_total: "ticket" or "proof".
void CountRefused(metrics::Sink& metrics, const std::string& transport, const CalleeReply& refusal,
                  const char* check);

inline constexpr size_t kProvedReplyBytes = kCalleeReplyBytes + kCalleeProofBytes;

/// The callee's part. Values only: it can be moved and asked on any thread.
class CalleeHandshake {
 public:
  /// Decides by protocol, then whom the caller meant, then `features`, then the handler. `first`:
  /// the caller's whole first message; `features`: what this side insists on, kFeatureMac or 0. A
  /// caller that does not ask for them is refused with kFailedPrecondition / kConfigInvalid.
  CalleeHandshake(const CallerHello& said, std::span<const std::byte> first, Incarnation self,
                  Handler& handler, uint64_t features = 0);

  /// What is answered first: a refusal, or the chosen protocol.
  const CalleeReply& reply() const { return reply_; }
  /// The answer is reply() and the callee's proof, and the caller's proof comes next.
  bool awaits_proof() const;
  std::array<std::byte, kProvedReplyBytes> callee_proof() const;
  /// The last word: reply(), or the refusal of a caller that has not the ticket.
  ///   kInvalidArgument / kInvalidRequest  the bytes are no proof
  Result<CalleeReply> OnProof(std::span<const std::byte> bytes) const;

  /// Of a session that opened.
  const Hello& hello() const { return hello_; }
  const Proof& key() const { return secrets_.key; }

 private:
  CalleeReply Decide(const CallerHello& said, Incarnation self, Handler& handler,
                     uint64_t features);

  Hello hello_;
  CalleeReply reply_;
  Nonce nonce_{};
  SessionSecrets secrets_;
};

/// The caller's part.
class CallerHandshake {
 public:
  explicit CallerHandshake(const Hello& hello);

  const CallerHello& caller_hello() const { return said_; }
  /// What follows the caller's hello is a callee's proof, if it is no refusal.
  bool awaits_proof() const { return said_.proves(); }
  /// The message that answers a proved reply; `first`: the caller's whole first message.
  ///   the reply's own code and reason     it was a refusal
  ///   kUnauthenticated / kTicketRejected  the callee has not the ticket: it is somebody else
  ///   kFailedPrecondition / kConfigInvalid  it has, and does not seal frames as hello asks
  ///   kInvalidArgument / kInvalidRequest  no such message
  Result<std::array<std::byte, kCallerProofBytes>> OnCalleeProof(std::span<const std::byte> first,
                                                                 std::span<const std::byte> bytes);
  const Hello& hello() const { return hello_; }
  const Proof& key() const { return key_; }

 private:
  const Hello hello_;
  CallerHello said_;
  Proof key_{};
};

}  // namespace weightwire::transport
