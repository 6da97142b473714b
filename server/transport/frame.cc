// magic 4 | type 2 | code 2 | reason 4 | 0 ×4 | request 8 | key id 8 | generation 8 | offset 8 |
// length 8 | 0 ×4 | checksum 4 over all that precedes it
#include "server/transport/frame.h"

#include <optional>
#include <string>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

constexpr uint32_t kFrameMagic = 0x52465757;  // "WWFR"

tl::unexpected<Status> Garbage(const char* what) {
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
              std::string("frame with a wrong ") + what);
}

}  // namespace

void EncodeFrame(const Frame& frame, std::span<std::byte, kFrameBytes> into) {
  LittleEndianWriter writer(into);
  writer.Put(kFrameMagic);
  writer.Put(static_cast<uint16_t>(frame.type));
  writer.Put(static_cast<uint16_t>(frame.code));
  writer.Put(static_cast<uint32_t>(frame.reason));
  writer.Put(uint32_t{0});
  writer.Put(frame.request);
  writer.Put(frame.key.id);
  writer.Put(frame.key.generation);
  writer.Put(frame.offset);
  writer.Put(frame.length);
  writer.Put(uint32_t{0});
  writer.Put(Checksum(into.first(kFrameBytes - 4)));
}

Result<Frame> DecodeFrame(std::span<const std::byte, kFrameBytes> bytes) {
  LittleEndianReader reader(bytes);
  if (reader.Take<uint32_t>() != kFrameMagic) return Garbage("magic");
  const uint32_t sum = LittleEndianReader(bytes.last(4)).Take<uint32_t>();
  if (sum != Checksum(bytes.first(kFrameBytes - 4))) return Garbage("checksum");
  const auto type = reader.Take<uint16_t>();
  if (type < static_cast<uint16_t>(FrameType::kGet) ||
      type > static_cast<uint16_t>(FrameType::kDeviceRegion)) {
    return Garbage("type");
  }
  const auto code = reader.Take<uint16_t>();
  if (code > static_cast<uint16_t>(Code::kUnauthenticated)) return Garbage("code");
  const auto reason_number = reader.Take<uint32_t>();
  const auto reason =
      reason_number <= 0xffff ? ReasonFromNumber(static_cast<int>(reason_number)) : std::nullopt;
  if (!reason.has_value()) return Garbage("reason");
  reader.Skip(4);
  Frame frame;
  frame.type = static_cast<FrameType>(type);
  frame.code = static_cast<Code>(code);
  frame.reason = *reason;
  frame.request = reader.Take<uint64_t>();
  frame.key.id = reader.Take<uint64_t>();
  frame.key.generation = reader.Take<uint64_t>();
  frame.offset = reader.Take<uint64_t>();
  frame.length = reader.Take<uint64_t>();
  return frame;
}

Status StatusOf(const Frame& reply) {
  return Status(reply.code, reply.reason,
                "the peer refused: " + std::string(ReasonName(reply.reason)));
}

}  // namespace weightwire::transport
