#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/transport/frame.h"

namespace weightwire::transport {

/// A range of a peer's memory that one Get may read.
struct UcxRange {
  uint64_t region = 0;   ///< names the remote key
  uint64_t address = 0;  ///< in the peer's process
  uint64_t bytes = 0;
  friend bool operator==(const UcxRange&, const UcxRange&) = default;
};

/// A message of an open session: a frame and `payload`, whose size the frame's `length` names.
/// `offset` holds the payload's checksum where there is a payload.
std::vector<std::byte> EncodeUcxMessage(Frame frame, std::span<const std::byte> payload);

struct UcxMessage {
  Frame frame;
  std::span<const std::byte> payload;  ///< of what was decoded
};
/// Total: any bytes give a message or
///   kInvalidArgument / kInvalidRequest  no frame, or a payload of another size or checksum. A kGet
///                                       has no payload: its length is what is asked for
Result<UcxMessage> DecodeUcxMessage(std::span<const std::byte> bytes);

std::vector<std::byte> EncodeUcxRanges(std::span<const UcxRange> ranges);
/// kInvalidArgument / kInvalidRequest: a ragged size, an empty range, or not `bytes` together.
Result<std::vector<UcxRange>> DecodeUcxRanges(std::span<const std::byte> payload, uint64_t bytes);

}  // namespace weightwire::transport
