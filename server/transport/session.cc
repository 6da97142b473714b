// Every message begins with magic and size and ends with a checksum over all that precedes it:
//
//   CallerHello   magic 4 | size 4 | protocol_min 2 | protocol_max 2 | 0 ×4 | features 8 |
//                 caller 8 | callee 8 | shown 16 | nonce 16 | 0 ×4 | checksum 4
//   CalleeReply   magic 4 | size 4 | protocol 2 | 0 ×2 | code 4 | reason 4 | 0 ×4 | features 8 |
//                 0 ×12 | checksum 4
//   CalleeProof   magic 4 | size 4 | nonce 16 | proof 32 | 0 ×4 | checksum 4
//   CallerProof   magic 4 | size 4 | proof 32 | 0 ×4 | checksum 4
//
// The form of the first two never changes with the protocol version, so that any two builds can
// refuse each other in words. The zeros are ignored when read.
#include "server/transport/session.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <string>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

constexpr uint32_t kIntroductionMagic = 0x50445757;  // "WWDP"
constexpr uint32_t kReplyMagic = 0x52445757;         // "WWDR"
constexpr uint32_t kChallengeMagic = 0x43445757;     // "WWDC"
constexpr uint32_t kProofMagic = 0x41445757;         // "WWDA"
constexpr size_t kChecksumBytes = 4;

void Seal(std::span<std::byte> message) {
  LittleEndianWriter(message.last(kChecksumBytes))
      .Put(Checksum(message.first(message.size() - kChecksumBytes)));
}

Status CheckSealed(std::span<const std::byte> message, size_t size, uint32_t magic,
                   const char* name) {
  auto refuse = [name](const char* what) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  std::string(name) + " with a wrong " + what);
  };
  if (message.size() != size) return refuse("size");
  LittleEndianReader reader(message);
  if (reader.Take<uint32_t>() != magic) return refuse("magic");
  if (reader.Take<uint32_t>() != size) return refuse("size");
  const uint32_t sum = LittleEndianReader(message.last(kChecksumBytes)).Take<uint32_t>();
  if (sum != Checksum(message.first(size - kChecksumBytes))) return refuse("checksum");
  return OkStatus();
}

}  // namespace

uint32_t Checksum(std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(XXH3_64bits(bytes.data(), bytes.size()));
}

std::array<std::byte, kCallerHelloBytes> EncodeCallerHello(const CallerHello& hello) {
  std::array<std::byte, kCallerHelloBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kIntroductionMagic);
  writer.Put(static_cast<uint32_t>(kCallerHelloBytes));
  writer.Put(hello.protocol_min);
  writer.Put(hello.protocol_max);
  writer.Skip(4);
  writer.Put(hello.features);
  writer.Put(hello.caller.value);
  writer.Put(hello.callee.value);
  writer.PutBytes(hello.shown);
  writer.PutBytes(hello.nonce);
  Seal(message);
  return message;
}

Result<CallerHello> DecodeCallerHello(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kCallerHelloBytes, kIntroductionMagic, "hello"));
  CallerHello hello;
  LittleEndianReader reader(bytes.subspan(8));
  hello.protocol_min = reader.Take<uint16_t>();
  hello.protocol_max = reader.Take<uint16_t>();
  reader.Skip(4);
  hello.features = reader.Take<uint64_t>();
  hello.caller = Incarnation(reader.Take<uint64_t>());
  hello.callee = Incarnation(reader.Take<uint64_t>());
  reader.TakeBytes(hello.shown);
  reader.TakeBytes(hello.nonce);
  return hello;
}

std::array<std::byte, kCalleeReplyBytes> EncodeCalleeReply(const CalleeReply& reply) {
  std::array<std::byte, kCalleeReplyBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kReplyMagic);
  writer.Put(static_cast<uint32_t>(kCalleeReplyBytes));
  writer.Put(reply.protocol);
  writer.Skip(2);
  writer.Put(static_cast<uint32_t>(reply.code));
  writer.Put(static_cast<uint32_t>(reply.reason));
  writer.Skip(4);
  writer.Put(reply.features);
  Seal(message);
  return message;
}

Result<CalleeReply> DecodeCalleeReply(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kCalleeReplyBytes, kReplyMagic, "hello reply"));
  CalleeReply reply;
  LittleEndianReader reader(bytes.subspan(8));
  reply.protocol = reader.Take<uint16_t>();
  reader.Skip(2);
  const auto code = reader.Take<uint32_t>();
  const auto reason_number = reader.Take<uint32_t>();
  const auto reason =
      reason_number <= 0xffff ? ReasonFromNumber(static_cast<int>(reason_number)) : std::nullopt;
  if (code > static_cast<uint32_t>(Code::kUnauthenticated) || !reason.has_value()) {
    return Fail(Code::kInvalidArgument, Reason::kUnknownEnum,
                "hello reply with an unknown code or reason");
  }
  reader.Skip(4);
  reply.code = static_cast<Code>(code);
  reply.reason = *reason;
  reply.features = reader.Take<uint64_t>();
  return reply;
}

std::array<std::byte, kCalleeProofBytes> EncodeCalleeProof(const CalleeProof& callee_proof) {
  std::array<std::byte, kCalleeProofBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kChallengeMagic);
  writer.Put(static_cast<uint32_t>(kCalleeProofBytes));
  writer.PutBytes(callee_proof.nonce);
  writer.PutBytes(callee_proof.proof);
  Seal(message);
  return message;
}

Result<CalleeProof> DecodeCalleeProof(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kCalleeProofBytes, kChallengeMagic, "callee's proof"));
  CalleeProof callee_proof;
  LittleEndianReader reader(bytes.subspan(8));
  reader.TakeBytes(callee_proof.nonce);
  reader.TakeBytes(callee_proof.proof);
  return callee_proof;
}

std::array<std::byte, kCallerProofBytes> EncodeCallerProof(const Proof& proof) {
  std::array<std::byte, kCallerProofBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kProofMagic);
  writer.Put(static_cast<uint32_t>(kCallerProofBytes));
  writer.PutBytes(proof);
  Seal(message);
  return message;
}

Result<Proof> DecodeCallerProof(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kCallerProofBytes, kProofMagic, "proof"));
  Proof proof;
  LittleEndianReader(bytes.subspan(8)).TakeBytes(proof);
  return proof;
}

Result<uint16_t> ChooseProtocol(uint16_t peer_min, uint16_t peer_max) {
  const uint16_t highest = std::min(peer_max, kProtocolMax);
  if (peer_min <= peer_max && highest >= peer_min && highest >= kProtocolMin) return highest;
  auto range = [](uint16_t low, uint16_t high) {
    return std::to_string(low) + ".." + std::to_string(high);
  };
  return Fail(Status(Code::kFailedPrecondition, Reason::kProtocolVersion,
                     "no common data-plane protocol: the peer speaks " + range(peer_min, peer_max) +
                         ", this side " + range(kProtocolMin, kProtocolMax))
                  .Remedy("upgrade the older side"));
}

}  // namespace weightwire::transport
