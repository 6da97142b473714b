#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "server/base/status.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

enum class FrameType : uint16_t {
  kGet = 1,           ///< request, key, offset, length
  kGetReply = 2,      ///< request, code, reason, length of what follows
  kNotify = 3,        ///< length of what follows
  kMap = 4,           ///< request, key
  kMapReply = 5,      ///< as kGetReply
  kRegion = 6,        ///< request = region id, length = its bytes; one fd comes with it
  kRegionGone = 7,    ///< request = region id
  kGetEnd = 8,        ///< request: the reader has stopped to touch the memory
  kSelfTest = 9,      ///< key: what the peer is to read before the session is used (ucx)
  kSelfTestEnd = 10,  ///< code, reason: whether that worked
  /// As kRegion, of GPU memory: offset in its allocation; what names that follows
  /// (local_devices.h). The fd is the lease (memory/gpu_memory_pool.h). Only where the transport
  /// has GPU memory.
  kDeviceRegion = 11,
};

/// Precedes everything on an open session. Fields that a type does not use are 0.
struct Frame {
  FrameType type = FrameType::kGet;
  Code code = Code::kOk;
  Reason reason = Reason::kNone;
  uint64_t request = 0;
  RegionKey key = {};
  uint64_t offset = 0;
  uint64_t length = 0;
  friend bool operator==(const Frame&, const Frame&) = default;
};
inline constexpr size_t kFrameBytes = 64;

/// Fixed little-endian form with magic and checksum.
void EncodeFrame(const Frame& frame, std::span<std::byte, kFrameBytes> into);
/// Total: any bytes give a frame or
///   kInvalidArgument / kInvalidRequest  wrong magic, checksum, type, code or reason
Result<Frame> DecodeFrame(std::span<const std::byte, kFrameBytes> bytes);

/// The failure that a reply carries (code must not be kOk).
Status StatusOf(const Frame& reply);

}  // namespace weightwire::transport
