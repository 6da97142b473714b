#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "server/base/status.h"

/// The fd socket beside an agent's gRPC socket (path + ".fd"): fixed little-endian frames.
///
///   request  u32 magic "WWFD", u32 op (1 put, 2 get), u64 token (0 for put); a put carries one fd
///   reply    u32 magic, u32 code (0 OK, else a Reason), u64 token; an OK get carries one fd
///
/// A connection may carry several requests, one after another.
namespace weightwire::wire {

inline constexpr uint32_t kFdMagic = 0x44465757;
inline constexpr size_t kFdFrameBytes = 16;
using FdFrame = std::array<std::byte, kFdFrameBytes>;

enum class FdOp : uint32_t { kPut = 1, kGet = 2 };

struct FdRequest {
  FdOp op = FdOp::kPut;
  uint64_t token = 0;
  friend bool operator==(const FdRequest&, const FdRequest&) = default;
};
struct FdReply {
  Reason reason = Reason::kNone;
  uint64_t token = 0;
  friend bool operator==(const FdReply&, const FdReply&) = default;
};

FdFrame Encode(const FdRequest& request);
FdFrame Encode(const FdReply& reply);
///   kInvalidArgument / kInvalidRequest | kUnknownEnum
Result<FdRequest> DecodeFdRequest(std::span<const std::byte, kFdFrameBytes> frame);
Result<FdReply> DecodeFdReply(std::span<const std::byte, kFdFrameBytes> frame);

}  // namespace weightwire::wire
