#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "server/base/ids.h"
#include "server/base/status.h"

namespace weightwire::transport {

inline constexpr uint16_t kProtocolMin = 1;
inline constexpr uint16_t kProtocolMax = 1;

/// What the caller says first on every data-plane session, and the frame header's version source.
struct Hello {
  uint16_t protocol_min = kProtocolMin;
  uint16_t protocol_max = kProtocolMax;
  uint64_t features = 0;  ///< bits that the caller understands
  Incarnation caller{};   ///< of the calling agent
  Incarnation callee{};   ///< of the agent that the caller means to reach
  Ticket ticket{};        ///< minted by the coordinator for this pair
  std::array<uint8_t, 16> trace_id{};
  friend bool operator==(const Hello&, const Hello&) = default;
};
inline constexpr size_t kHelloBytes = 80;

/// Fixed little-endian form: magic "WWDP", sizes and a checksum included.
std::array<std::byte, kHelloBytes> EncodeHello(const Hello& hello);
///   kInvalidArgument / kInvalidRequest  wrong size, magic or checksum
///   kInvalidArgument / kUnknownEnum     (reply) a code or reason that this build does not know
Result<Hello> DecodeHello(std::span<const std::byte> bytes);

/// What the callee answers: the chosen protocol, or why not.
struct HelloReply {
  uint16_t protocol = 0;
  uint64_t features = 0;
  Code code = Code::kOk;
  Reason reason = Reason::kNone;
  friend bool operator==(const HelloReply&, const HelloReply&) = default;
};
inline constexpr size_t kHelloReplyBytes = 48;
std::array<std::byte, kHelloReplyBytes> EncodeHelloReply(const HelloReply& reply);
Result<HelloReply> DecodeHelloReply(std::span<const std::byte> bytes);

/// Highest version both sides speak. kFailedPrecondition / kProtocolVersion naming both ranges.
Result<uint16_t> ChooseProtocol(uint16_t peer_min, uint16_t peer_max);

}  // namespace weightwire::transport
