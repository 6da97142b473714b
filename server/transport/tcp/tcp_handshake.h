#pragma once

#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "server/transport/session.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_endpoint.h"

/// How a session gets its sockets: the caller sends Open on the first one and reads a Welcome, then
/// opens the others, sends Join on each with the token of the welcome, and reads a Welcome on each.
namespace weightwire::transport {

inline constexpr uint32_t kTcpConnectionsMax = 16;

/// Names a session that is being opened. Random.
using SessionToken = std::array<uint8_t, 16>;

struct TcpOpen {
  Hello hello;
  uint32_t connections = 1;  ///< wanted
};
struct TcpJoin {
  SessionToken token{};
  uint32_t index = 0;  ///< of the socket, ≥ 1
};
inline constexpr size_t kPreambleBytes = 96;
using Preamble = std::array<std::byte, kPreambleBytes>;
Preamble EncodeOpen(const TcpOpen& open);
Preamble EncodeJoin(const TcpJoin& join);
///   kInvalidArgument / kInvalidRequest
Result<std::variant<TcpOpen, TcpJoin>> DecodePreamble(std::span<const std::byte> bytes);

struct TcpWelcome {
  HelloReply reply;
  SessionToken token{};
  uint32_t connections = 1;  ///< granted: at most what was wanted
};
inline constexpr size_t kWelcomeBytes = kHelloReplyBytes + 32;
std::array<std::byte, kWelcomeBytes> EncodeWelcome(const TcpWelcome& welcome);
Result<TcpWelcome> DecodeWelcome(std::span<const std::byte> bytes);

/// What every data socket wants: no delay, and an end when the peer's host has gone.
void Tune(boost::asio::ip::tcp::socket& socket, const TcpOptions& options);

/// Sends a short message on a fresh socket, whose buffer is empty: it goes at once or not at all.
bool SendNow(boost::asio::ip::tcp::socket& socket, std::span<const std::byte> message);

/// A session over `sockets`, each moved to its loop. Not started.
std::shared_ptr<TcpEndpoint> MakeTcpEndpoint(const std::shared_ptr<TcpCore>& core,
                                             const Hello& hello,
                                             std::vector<boost::asio::ip::tcp::socket> sockets);

}  // namespace weightwire::transport
