// open     caller's hello 80 | connections 4 | 0 ×8 | checksum 4
// join     magic 4 | token 16 | index 4 | proof 32 | 0 ×36 | checksum 4
// welcome  hello reply 48 | token 16 | connections 4 | 0 ×8 | checksum 4
// Each checksum covers all that precedes it.
#include "server/transport/tcp/tcp_preamble.h"

#include <algorithm>
#include <string>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

constexpr uint32_t kJoinMagic = 0x4e4a5757;  // "WWJN"

bool ChecksumHolds(std::span<const std::byte> message) {
  return LittleEndianReader(message.last(4)).Take<uint32_t>() ==
         Checksum(message.first(message.size() - 4));
}

tl::unexpected<Status> Garbage(const char* what) {
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest, std::string("a wrong ") + what);
}

}  // namespace

Preamble EncodeOpen(const TcpOpen& open) {
  Preamble preamble{};
  const auto hello = EncodeCallerHello(open.caller_hello);
  std::ranges::copy(hello, preamble.begin());
  LittleEndianWriter writer{std::span(preamble).subspan(kCallerHelloBytes)};
  writer.Put(open.connections);
  writer.Skip(8);
  writer.Put(Checksum(std::span(preamble).first(kPreambleBytes - 4)));
  return preamble;
}

Preamble EncodeJoin(const TcpJoin& join) {
  Preamble preamble{};
  LittleEndianWriter writer(preamble);
  writer.Put(kJoinMagic);
  writer.PutBytes(join.token);
  writer.Put(join.index);
  writer.PutBytes(join.proof);
  LittleEndianWriter(std::span(preamble).last(4))
      .Put(Checksum(std::span(preamble).first(kPreambleBytes - 4)));
  return preamble;
}

Proof JoinProof(const Proof& session_key, const SessionToken& token, uint32_t index) {
  std::array<std::byte, 20> message{};
  LittleEndianWriter writer(message);
  writer.PutBytes(token);
  writer.Put(index);
  return KeyedProof(session_key, "weightwire join", message);
}

Result<std::variant<TcpOpen, TcpJoin>> DecodePreamble(std::span<const std::byte> bytes) {
  if (bytes.size() != kPreambleBytes || !ChecksumHolds(bytes)) return Garbage("preamble");
  LittleEndianReader reader(bytes);
  if (reader.Take<uint32_t>() == kJoinMagic) {
    TcpJoin join;
    reader.TakeBytes(join.token);
    join.index = reader.Take<uint32_t>();
    reader.TakeBytes(join.proof);
    return join;
  }
  TcpOpen open;
  WW_ASSIGN(open.caller_hello, DecodeCallerHello(bytes.first(kCallerHelloBytes)));
  open.connections = LittleEndianReader(bytes.subspan(kCallerHelloBytes)).Take<uint32_t>();
  if (open.connections == 0) return Garbage("number of connections");
  return open;
}

std::array<std::byte, kWelcomeBytes> EncodeWelcome(const TcpWelcome& welcome) {
  std::array<std::byte, kWelcomeBytes> message{};
  const auto reply = EncodeCalleeReply(welcome.reply);
  std::copy(reply.begin(), reply.end(), message.begin());
  LittleEndianWriter writer{std::span(message).subspan(kCalleeReplyBytes)};
  writer.PutBytes(welcome.token);
  writer.Put(welcome.connections);
  writer.Skip(8);
  writer.Put(Checksum(std::span(message).first(kWelcomeBytes - 4)));
  return message;
}

Result<TcpWelcome> DecodeWelcome(std::span<const std::byte> bytes) {
  if (bytes.size() != kWelcomeBytes || !ChecksumHolds(bytes)) return Garbage("welcome");
  TcpWelcome welcome;
  WW_ASSIGN(welcome.reply, DecodeCalleeReply(bytes.first(kCalleeReplyBytes)));
  LittleEndianReader reader(bytes.subspan(kCalleeReplyBytes));
  reader.TakeBytes(welcome.token);
  welcome.connections = reader.Take<uint32_t>();
  if (welcome.connections == 0 || welcome.connections > kTcpConnectionsMax) {
    return Garbage("number of connections");
  }
  return welcome;
}

}  // namespace weightwire::transport
