#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include "server/base/status.h"
#include "server/transport/proof.h"

/// What is said on a tcp socket before frames are. The caller sends Open on a session's first
/// socket, proves itself (handshake.h) and reads a Welcome; then it opens the others, sends Join on
/// each with the token of the welcome, and reads a Welcome on each.
namespace weightwire::transport {

inline constexpr uint32_t kTcpConnectionsMax = 16;

/// Names a session that is being opened. Random.
using SessionToken = Nonce;

struct TcpOpen {
  CallerHello caller_hello;
  uint32_t connections = 1;  ///< wanted
};
struct TcpJoin {
  SessionToken token{};
  uint32_t index = 0;  ///< of the socket, ≥ 1
  Proof proof{};       ///< JoinProof; before kProtocolProof zeros
};
inline constexpr size_t kPreambleBytes = 96;
using Preamble = std::array<std::byte, kPreambleBytes>;
Preamble EncodeOpen(const TcpOpen& open);
Preamble EncodeJoin(const TcpJoin& join);
/// That whoever joins opened the session: the token can be read on the way.
Proof JoinProof(const Proof& session_key, const SessionToken& token, uint32_t index);
///   kInvalidArgument / kInvalidRequest
Result<std::variant<TcpOpen, TcpJoin>> DecodePreamble(std::span<const std::byte> bytes);

struct TcpWelcome {
  CalleeReply reply;
  SessionToken token{};
  uint32_t connections = 1;  ///< granted: at most what was wanted
};
inline constexpr size_t kWelcomeBytes = kCalleeReplyBytes + 32;
std::array<std::byte, kWelcomeBytes> EncodeWelcome(const TcpWelcome& welcome);
Result<TcpWelcome> DecodeWelcome(std::span<const std::byte> bytes);

}  // namespace weightwire::transport
