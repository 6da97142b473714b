#include "server/transport/handshake.h"

#include <algorithm>
#include <string>

namespace weightwire::transport {
namespace {

CalleeReply Refusal(const Status& why) { return CalleeReply{0, 0, why.code(), why.reason()}; }

Status NoProof(const char* who) {
  return Status(Code::kUnauthenticated, Reason::kTicketRejected,
                std::string("the ") + who + " did not prove that it has the session's ticket");
}

Status UnlikeIntegrity(const char* message) {
  return Status(Code::kFailedPrecondition, Reason::kConfigInvalid, message)
      .Remedy("set integrity alike on all agents of the job, of this version or later");
}

bool Seals(uint64_t features) { return (features & kFeatureMac) != 0; }

}  // namespace

Status StatusOf(const CalleeReply& reply) {
  if (reply.code == Code::kOk) return OkStatus();
  if (reply.reason == Reason::kConfigInvalid) {
    return UnlikeIntegrity("the peer refused the session: its integrity is mac, and ours is not");
  }
  return Status(reply.code, reply.reason,
                "the peer refused the session: " + std::string(ReasonName(reply.reason)));
}

void CountRefused(metrics::Sink& metrics, const std::string& transport, const CalleeReply& refusal,
                  const char* check) {
  const bool full = refusal.reason == Reason::kLimitExceeded;
  metrics.Add("transport_closes_total", 1,
              {{"transport", transport}, {"cause", full ? "sessions_full" : "refused"}});
  if (refusal.reason == Reason::kTicketRejected) {
    metrics.Add("auth_failures_total", 1, {{"reason", check}});
  }
}

CalleeHandshake::CalleeHandshake(const CallerHello& said, std::span<const std::byte> first,
                                 Incarnation self, Handler& handler, uint64_t features)
    : reply_(Decide(said, self, handler, features)) {
  if (!awaits_proof()) return;
  nonce_ = RandomNonce();
  secrets_ = SecretsOf(hello_.ticket, first, EncodeCalleeReply(reply_), nonce_);
}

CalleeReply CalleeHandshake::Decide(const CallerHello& said, Incarnation self, Handler& handler,
                                    uint64_t features) {
  auto protocol = ChooseProtocol(said.protocol_min, said.protocol_max);
  if (!protocol.has_value()) return Refusal(protocol.error());
  if (said.callee != self) {
    return Refusal(Status(Code::kFailedPrecondition, Reason::kStaleIncarnation, ""));
  }
  // The keys of MACs come out of the proofs.
  if (Seals(features) && !(Seals(said.features) && said.proves())) {
    return Refusal(UnlikeIntegrity("the caller does not seal its frames"));
  }
  auto ticket = handler.OnHello(said);
  if (!ticket.has_value()) return Refusal(ticket.error());
  hello_ = {said.protocol_min, said.protocol_max, said.features, said.caller, said.callee, *ticket};
  return CalleeReply{*protocol, features, Code::kOk, Reason::kNone};
}

bool CalleeHandshake::awaits_proof() const {
  return reply_.code == Code::kOk && hello_.protocol_min >= kProtocolProof;
}

std::array<std::byte, kProvedReplyBytes> CalleeHandshake::callee_proof() const {
  std::array<std::byte, kProvedReplyBytes> message;
  const auto end = std::ranges::copy(EncodeCalleeReply(reply_), message.begin()).out;
  std::ranges::copy(EncodeCalleeProof({nonce_, secrets_.of_callee}), end);
  return message;
}

Result<CalleeReply> CalleeHandshake::OnProof(std::span<const std::byte> bytes) const {
  WW_ASSIGN(const Proof proof, DecodeCallerProof(bytes));
  return SameProof(proof, secrets_.of_caller) ? reply_ : Refusal(NoProof("caller"));
}

CallerHandshake::CallerHandshake(const Hello& hello)
    : hello_(hello), said_{hello.protocol_min, hello.protocol_max, hello.features, hello.caller,
                           hello.callee,       hello.ticket,       RandomNonce()} {
  if (said_.proves()) said_.shown = NameOf(hello.ticket);
}

Result<std::array<std::byte, kCallerProofBytes>> CallerHandshake::OnCalleeProof(
    std::span<const std::byte> first, std::span<const std::byte> bytes) {
  const auto reply_bytes = bytes.first(std::min(bytes.size(), kCalleeReplyBytes));
  WW_ASSIGN(const CalleeReply reply, DecodeCalleeReply(reply_bytes));
  WW_FAIL_IF_ERROR(StatusOf(reply));
  WW_ASSIGN(const CalleeProof callee_proof, DecodeCalleeProof(bytes.subspan(kCalleeReplyBytes)));
  const SessionSecrets secrets = SecretsOf(hello_.ticket, first, reply_bytes, callee_proof.nonce);
  if (!SameProof(callee_proof.proof, secrets.of_callee)) {
    return Fail(Status(NoProof("peer")).Remedy("somebody else listens at its address"));
  }
  if (Seals(hello_.features) && !Seals(reply.features)) {
    return Fail(UnlikeIntegrity("our integrity is mac, and the peer does not seal its frames"));
  }
  key_ = secrets.key;
  return EncodeCallerProof(secrets.of_caller);
}

}  // namespace weightwire::transport
