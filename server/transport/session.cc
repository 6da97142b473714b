// Every message begins with magic and size and ends with a checksum over all that precedes it:
//
//   introduction  magic 4 | size 4 | protocol_min 2 | protocol_max 2 | 0 ×4 | features 8 | caller 8
//   |
//                 callee 8 | shown 16 | nonce 16 | 0 ×4 | checksum 4
//   reply         magic 4 | size 4 | protocol 2 | 0 ×2 | code 4 | reason 4 | 0 ×4 | features 8 |
//                 0 ×12 | checksum 4
//   challenge     magic 4 | size 4 | nonce 16 | proof 32 | 0 ×4 | checksum 4
//   proof         magic 4 | size 4 | proof 32 | 0 ×4 | checksum 4
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

std::array<std::byte, kIntroductionBytes> EncodeIntroduction(const Introduction& introduction) {
  std::array<std::byte, kIntroductionBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kIntroductionMagic);
  writer.Put(static_cast<uint32_t>(kIntroductionBytes));
  writer.Put(introduction.protocol_min);
  writer.Put(introduction.protocol_max);
  writer.Skip(4);
  writer.Put(introduction.features);
  writer.Put(introduction.caller.value);
  writer.Put(introduction.callee.value);
  writer.PutBytes(introduction.shown);
  writer.PutBytes(introduction.nonce);
  Seal(message);
  return message;
}

Result<Introduction> DecodeIntroduction(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kIntroductionBytes, kIntroductionMagic, "hello"));
  Introduction introduction;
  LittleEndianReader reader(bytes.subspan(8));
  introduction.protocol_min = reader.Take<uint16_t>();
  introduction.protocol_max = reader.Take<uint16_t>();
  reader.Skip(4);
  introduction.features = reader.Take<uint64_t>();
  introduction.caller = Incarnation(reader.Take<uint64_t>());
  introduction.callee = Incarnation(reader.Take<uint64_t>());
  reader.TakeBytes(introduction.shown);
  reader.TakeBytes(introduction.nonce);
  return introduction;
}

std::array<std::byte, kHelloReplyBytes> EncodeHelloReply(const HelloReply& reply) {
  std::array<std::byte, kHelloReplyBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kReplyMagic);
  writer.Put(static_cast<uint32_t>(kHelloReplyBytes));
  writer.Put(reply.protocol);
  writer.Skip(2);
  writer.Put(static_cast<uint32_t>(reply.code));
  writer.Put(static_cast<uint32_t>(reply.reason));
  writer.Skip(4);
  writer.Put(reply.features);
  Seal(message);
  return message;
}

Result<HelloReply> DecodeHelloReply(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kHelloReplyBytes, kReplyMagic, "hello reply"));
  HelloReply reply;
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

std::array<std::byte, kChallengeBytes> EncodeChallenge(const Challenge& challenge) {
  std::array<std::byte, kChallengeBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kChallengeMagic);
  writer.Put(static_cast<uint32_t>(kChallengeBytes));
  writer.PutBytes(challenge.nonce);
  writer.PutBytes(challenge.proof);
  Seal(message);
  return message;
}

Result<Challenge> DecodeChallenge(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kChallengeBytes, kChallengeMagic, "challenge"));
  Challenge challenge;
  LittleEndianReader reader(bytes.subspan(8));
  reader.TakeBytes(challenge.nonce);
  reader.TakeBytes(challenge.proof);
  return challenge;
}

std::array<std::byte, kProofBytes> EncodeProof(const Proof& proof) {
  std::array<std::byte, kProofBytes> message{};
  LittleEndianWriter writer(message);
  writer.Put(kProofMagic);
  writer.Put(static_cast<uint32_t>(kProofBytes));
  writer.PutBytes(proof);
  Seal(message);
  return message;
}

Result<Proof> DecodeProof(std::span<const std::byte> bytes) {
  WW_FAIL_IF_ERROR(CheckSealed(bytes, kProofBytes, kProofMagic, "proof"));
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
