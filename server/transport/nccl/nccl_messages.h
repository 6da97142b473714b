#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "server/base/status.h"
#include "server/transport/frame.h"

/// What the two sides of a session say to each other, as notifies of the session below.
namespace weightwire::transport {

/// The callee is to form `lane` with who made the id, as rank 1 of 2.
struct NcclForm {
  uint32_t lane = 0;
  uint64_t buffer_bytes = 0;  ///< the caller's: no round is larger
  std::array<uint8_t, 128> unique_id{};
  friend bool operator==(const NcclForm&, const NcclForm&) = default;
};

/// On `lane`: a kGet of the caller, or a kGetReply of the callee. A reply that is OK announces that
/// `length` bytes of the request are in the next round, behind those of the replies before it;
/// `offset` is 1 in the last reply of a round.
struct NcclRequest {
  uint32_t lane = 0;
  Frame frame;
  friend bool operator==(const NcclRequest&, const NcclRequest&) = default;
};

/// The user's.
using NcclNotify = std::vector<std::byte>;
using NcclMessage = std::variant<NcclNotify, NcclForm, NcclRequest>;

/// Lanes of a session: one for each GPU of the caller.
inline constexpr uint32_t kNcclLanesMax = 16;
inline constexpr size_t kNcclMessageBytesMax = 1 + 4 + 8 + 128;

/// Of an encoded message: it is the user's.
bool IsNotify(std::span<const std::byte> bytes);
std::vector<std::byte> EncodeNotify(std::span<const std::byte> message);
std::vector<std::byte> Encode(const NcclForm& form);
std::vector<std::byte> Encode(const NcclRequest& request);
/// Total: any bytes give a message or kInvalidArgument / kInvalidRequest.
Result<NcclMessage> DecodeNcclMessage(std::span<const std::byte> bytes);

}  // namespace weightwire::transport
