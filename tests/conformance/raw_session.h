#pragma once

#include <optional>
#include <span>
#include <vector>

#include "server/transport/handshake.h"
#include "server/transport/tcp/tcp_preamble.h"
#include "tests/conformance/plain_socket.h"

/// Both halves of opening a session of shm or tcp on a plain socket.
namespace weightwire::conformance {

/// A caller, right in every way as long as the test lets it be.
class RawCaller {
 public:
  RawCaller(bool is_tcp, const transport::Hello& hello, uint32_t connections = 1)
      : is_tcp_(is_tcp), handshake_(hello) {
    if (is_tcp) {
      const auto bytes = transport::EncodeOpen({handshake_.caller_hello(), connections});
      first_.assign(bytes.begin(), bytes.end());
    } else {
      const auto bytes = transport::EncodeCallerHello(handshake_.caller_hello());
      first_.assign(bytes.begin(), bytes.end());
    }
  }

  /// Its first message; changed, it stands for another one that was sent.
  std::vector<std::byte>& first() { return first_; }
  const transport::Proof& key() const { return handshake_.key(); }

  /// The proof that belongs to what the callee answers; none when it refused.
  std::optional<std::vector<std::byte>> Challenged(Plain& plain) {
    plain.Send(first_);
    std::array<std::byte, transport::kProvedReplyBytes> bytes;
    if (!plain.Receive(std::span(bytes).first(transport::kCalleeReplyBytes))) return {};
    const auto reply =
        transport::DecodeCalleeReply(std::span(bytes).first(transport::kCalleeReplyBytes));
    if (!reply.has_value()) return {};
    verdict = *reply;
    if (reply->code != Code::kOk) return {};
    if (!plain.Receive(std::span(bytes).subspan(transport::kCalleeReplyBytes))) return {};
    const auto proof = handshake_.OnCalleeProof(first_, bytes);
    if (!proof.has_value()) return {};
    return std::vector<std::byte>(proof->begin(), proof->end());
  }
  /// Sends `proof` and hears what the callee makes of it, in `verdict` and `token`.
  bool Conclude(Plain& plain, std::span<const std::byte> proof) {
    plain.Send(proof);
    std::vector<std::byte> answer(is_tcp_ ? transport::kWelcomeBytes
                                          : transport::kCalleeReplyBytes);
    if (!plain.Receive(answer)) return false;
    const auto reply =
        transport::DecodeCalleeReply(std::span(answer).first(transport::kCalleeReplyBytes));
    if (!reply.has_value()) return false;
    verdict = *reply;
    if (is_tcp_) token = transport::DecodeWelcome(answer)->token;
    return true;
  }
  /// All of it; false when no session came of it.
  bool Open(Plain& plain) {
    const auto proof = Challenged(plain);
    return proof && Conclude(plain, *proof) && verdict.code == Code::kOk;
  }

  transport::CalleeReply verdict;
  transport::SessionToken token{};

 private:
  const bool is_tcp_;
  transport::CallerHandshake handshake_;
  std::vector<std::byte> first_;
};

/// A callee that admits what `handler` does. False when its caller was no right one.
inline bool AnswerRaw(bool is_tcp, Plain& plain, Incarnation self, transport::Handler& handler) {
  std::vector<std::byte> first(is_tcp ? transport::kPreambleBytes : transport::kCallerHelloBytes);
  if (!plain.Receive(first)) return false;
  const auto said =
      transport::DecodeCallerHello(std::span(first).first(transport::kCallerHelloBytes));
  if (!said.has_value()) return false;
  const transport::CalleeHandshake handshake(*said, first, self, handler);
  plain.Send(handshake.callee_proof());
  std::array<std::byte, transport::kCallerProofBytes> proof;
  if (!plain.Receive(proof)) return false;
  const auto verdict = handshake.OnProof(proof);
  if (!verdict.has_value() || verdict->code != Code::kOk) return false;
  if (is_tcp) {
    plain.Send(transport::EncodeWelcome({*verdict, {}, 1}));
  } else {
    plain.Send(transport::EncodeCalleeReply(*verdict));
  }
  return true;
}

}  // namespace weightwire::conformance
