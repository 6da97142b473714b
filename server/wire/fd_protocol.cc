#include "server/wire/fd_protocol.h"

#include "server/wire/checks.h"

namespace weightwire::wire {
namespace {

void Put(uint64_t value, size_t bytes, std::byte* out) {
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

uint64_t Take(const std::byte* in, size_t bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value |= static_cast<uint64_t>(in[i]) << (8 * i);
  return value;
}

FdFrame Frame(uint32_t word, uint64_t token) {
  FdFrame out;
  Put(kFdMagic, 4, out.data());
  Put(word, 4, out.data() + 4);
  Put(token, 8, out.data() + 8);
  return out;
}

Status CheckMagic(std::span<const std::byte, kFdFrameBytes> frame) {
  return Take(frame.data(), 4) == kFdMagic ? OkStatus() : Bad("fd frame", "wrong magic");
}

}  // namespace

FdFrame Encode(const FdRequest& request) {
  return Frame(static_cast<uint32_t>(request.op), request.token);
}

FdFrame Encode(const FdReply& reply) {
  return Frame(static_cast<uint32_t>(reply.reason), reply.token);
}

Result<FdRequest> DecodeFdRequest(std::span<const std::byte, kFdFrameBytes> frame) {
  WW_FAIL_IF_ERROR(CheckMagic(frame));
  const auto op = static_cast<uint32_t>(Take(frame.data() + 4, 4));
  if (op != static_cast<uint32_t>(FdOp::kPut) && op != static_cast<uint32_t>(FdOp::kGet)) {
    return Fail(UnknownEnum("fd frame.op", static_cast<int>(op)));
  }
  return FdRequest{static_cast<FdOp>(op), Take(frame.data() + 8, 8)};
}

Result<FdReply> DecodeFdReply(std::span<const std::byte, kFdFrameBytes> frame) {
  WW_FAIL_IF_ERROR(CheckMagic(frame));
  const auto number = static_cast<int>(static_cast<uint32_t>(Take(frame.data() + 4, 4)));
  const auto reason = ReasonFromNumber(number);
  if (!reason) return Fail(UnknownEnum("fd frame.code", number));
  return FdReply{*reason, Take(frame.data() + 8, 8)};
}

}  // namespace weightwire::wire
