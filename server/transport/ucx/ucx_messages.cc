#include "server/transport/ucx/ucx_messages.h"

#include <algorithm>

#include "server/base/checked.h"
#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

constexpr size_t kRangeBytes = 24;

tl::unexpected<Status> Garbage(const char* what) {
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest, what);
}

}  // namespace

std::vector<std::byte> EncodeUcxMessage(Frame frame, std::span<const std::byte> payload) {
  if (frame.type != FrameType::kGet) {
    frame.length = payload.size();
    frame.offset = Checksum(payload);
  }
  std::vector<std::byte> message(kFrameBytes + payload.size());
  EncodeFrame(frame, std::span<std::byte, kFrameBytes>(message.data(), kFrameBytes));
  std::copy(payload.begin(), payload.end(), message.begin() + kFrameBytes);
  return message;
}

Result<UcxMessage> DecodeUcxMessage(std::span<const std::byte> bytes) {
  if (bytes.size() < kFrameBytes) return Garbage("a message shorter than a frame");
  WW_ASSIGN(Frame frame, DecodeFrame(bytes.first<kFrameBytes>()));
  const auto payload = bytes.subspan(kFrameBytes);
  if (frame.type == FrameType::kGet) {
    if (!payload.empty()) return Garbage("a request with a payload");
  } else if (payload.size() != frame.length) {
    return Garbage("a payload of another length");
  } else if (Checksum(payload) != frame.offset) {
    return Garbage("a payload with a wrong checksum");
  }
  return UcxMessage{frame, payload};
}

std::vector<std::byte> EncodeUcxRanges(std::span<const UcxRange> ranges) {
  std::vector<std::byte> payload(ranges.size() * kRangeBytes);
  LittleEndianWriter writer(payload);
  for (const UcxRange& range : ranges) {
    writer.Put(range.region);
    writer.Put(range.address);
    writer.Put(range.bytes);
  }
  return payload;
}

Result<std::vector<UcxRange>> DecodeUcxRanges(std::span<const std::byte> payload, uint64_t bytes) {
  if (payload.size() % kRangeBytes != 0) return Garbage("ranges of a ragged size");
  std::vector<UcxRange> ranges(payload.size() / kRangeBytes);
  LittleEndianReader reader(payload);
  uint64_t total = 0;
  for (UcxRange& range : ranges) {
    range.region = reader.Take<uint64_t>();
    range.address = reader.Take<uint64_t>();
    range.bytes = reader.Take<uint64_t>();
    const auto sum = CheckedAdd(total, range.bytes);
    if (range.bytes == 0 || !sum.has_value()) return Garbage("an empty or endless range");
    total = *sum;
  }
  if (total != bytes) return Garbage("ranges of another length than the Get");
  return ranges;
}

}  // namespace weightwire::transport
