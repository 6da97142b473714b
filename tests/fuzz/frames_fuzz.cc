// What arrives on the data plane's sockets, before anything about the peer is known. Each message
// ends with a checksum that the fuzzer would never guess: every input is tried as it is, and again
// with its checksums mended. What is accepted encodes to something that decodes to the same.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/transfer/notify.h"
#include "server/transport/frame.h"
#include "server/transport/little_endian.h"
#include "server/transport/session.h"
#include "server/transport/tcp/tcp_preamble.h"
#include "server/transport/ucx/ucx_messages.h"
#include "tests/fuzz/kinds.h"

namespace weightwire::transport {
namespace {

/// Puts the checksum of all that precedes it into the last four bytes.
void Mend(std::span<std::byte> message) {
  if (message.size() < 4) return;
  LittleEndianWriter(message.last(4)).Put(Checksum(message.first(message.size() - 4)));
}

void Framed(std::span<const std::byte> bytes) {
  if (bytes.size() != kFrameBytes) return;
  const auto frame = DecodeFrame(bytes.first<kFrameBytes>());
  if (!frame) return;
  std::array<std::byte, kFrameBytes> again{};
  EncodeFrame(*frame, again);
  WW_CHECK(DecodeFrame(again) == frame);
}

void OnPreamble(std::span<const std::byte> bytes) {
  const auto preamble = DecodePreamble(bytes);
  if (!preamble) return;
  if (const auto* open = std::get_if<TcpOpen>(&*preamble)) {
    const auto again = DecodePreamble(EncodeOpen(*open));
    WW_CHECK(again && std::get<TcpOpen>(*again).caller_hello == open->caller_hello);
    return;
  }
  const auto& join = std::get<TcpJoin>(*preamble);
  const auto again = DecodePreamble(EncodeJoin(join));
  WW_CHECK(again && std::get<TcpJoin>(*again).token == join.token &&
           std::get<TcpJoin>(*again).proof == join.proof);
}

void OnWelcome(std::span<const std::byte> bytes) {
  const auto welcome = DecodeWelcome(bytes);
  if (!welcome) return;
  const auto again = DecodeWelcome(EncodeWelcome(*welcome));
  WW_CHECK(again && again->reply == welcome->reply && again->token == welcome->token);
}

void OnUcxMessage(std::span<const std::byte> bytes) {
  const auto message = DecodeUcxMessage(bytes);
  if (!message) return;
  WW_CHECK(message->payload.size() <= bytes.size());
  const auto again = EncodeUcxMessage(message->frame, message->payload);
  WW_CHECK(DecodeUcxMessage(again).has_value());
}

void OnUcxRanges(std::span<const std::byte> bytes) {
  if (bytes.size() < 8) return;
  const auto total = LittleEndianReader(bytes).Take<uint64_t>();
  const auto ranges = DecodeUcxRanges(bytes.subspan(8), total);
  if (ranges) WW_CHECK(DecodeUcxRanges(EncodeUcxRanges(*ranges), total) == ranges);
}

void OnNotify(std::span<const std::byte> bytes) {
  const auto notify = transfer::DecodeNotify(bytes);
  if (!notify) return;
  WW_CHECK(std::ranges::equal(transfer::EncodeNotify(*notify).span(), bytes));
}

void One(fuzz::FrameKind kind, std::span<const std::byte> bytes) {
  using fuzz::FrameKind;
  switch (kind) {
    case FrameKind::kFrame:
      return Framed(bytes);
    case FrameKind::kHello:
      if (const auto said = DecodeCallerHello(bytes)) {
        WW_CHECK(DecodeCallerHello(EncodeCallerHello(*said)) == said);
        static_cast<void>(ChooseProtocol(said->protocol_min, said->protocol_max));
      }
      return;
    case FrameKind::kHelloReply:
      if (const auto reply = DecodeCalleeReply(bytes)) {
        WW_CHECK(DecodeCalleeReply(EncodeCalleeReply(*reply)) == reply);
      }
      return;
    case FrameKind::kPreamble:
      return OnPreamble(bytes);
    case FrameKind::kWelcome:
      return OnWelcome(bytes);
    case FrameKind::kUcxMessage:
      return OnUcxMessage(bytes);
    case FrameKind::kUcxRanges:
      return OnUcxRanges(bytes);
    case FrameKind::kNotify:
      return OnNotify(bytes);
    case FrameKind::kChallenge:
      if (const auto callee_proof = DecodeCalleeProof(bytes)) {
        WW_CHECK(DecodeCalleeProof(EncodeCalleeProof(*callee_proof)) == callee_proof);
      }
      return;
    case FrameKind::kProof:
      if (const auto proof = DecodeCallerProof(bytes))
        WW_CHECK(DecodeCallerProof(EncodeCallerProof(*proof)) == proof);
      return;
    case FrameKind::kEnd:
      return;
  }
}

/// What the fuzzer changed, with every checksum as the sender would have set it: the hello's inside
/// a preamble or welcome, then the message's own.
std::vector<std::byte> Mended(fuzz::FrameKind kind, std::span<const std::byte> bytes) {
  std::vector<std::byte> mended(bytes.begin(), bytes.end());
  const std::span<std::byte> all(mended);
  if (kind == fuzz::FrameKind::kPreamble && mended.size() >= kCallerHelloBytes) {
    Mend(all.first(kCallerHelloBytes));
  }
  if (kind == fuzz::FrameKind::kWelcome && mended.size() >= kCalleeReplyBytes) {
    Mend(all.first(kCalleeReplyBytes));
  }
  if (kind != fuzz::FrameKind::kUcxMessage) {
    Mend(all);
    return mended;
  }
  if (mended.size() < kFrameBytes) return mended;
  // offset = the payload's checksum, 40 bytes into the frame; then the frame's own.
  const auto payload = all.subspan(kFrameBytes);
  if (!payload.empty()) {
    LittleEndianWriter(all.subspan(40, 16)).Put(uint64_t{Checksum(payload)});
    LittleEndianWriter(all.subspan(48, 8)).Put(uint64_t{payload.size()});
  }
  Mend(all.first(kFrameBytes));
  return mended;
}

}  // namespace
}  // namespace weightwire::transport

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using weightwire::fuzz::FrameKind;
  using namespace weightwire::transport;
  if (size == 0 || data[0] >= static_cast<uint8_t>(FrameKind::kEnd)) return -1;
  const auto kind = static_cast<FrameKind>(data[0]);
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  One(kind, bytes);
  if (kind != FrameKind::kNotify && kind != FrameKind::kUcxRanges) One(kind, Mended(kind, bytes));
  return 0;
}
