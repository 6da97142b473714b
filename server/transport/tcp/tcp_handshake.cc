// open     hello 80 | connections 4 | 0 ×8 | checksum 4
// join     magic 4 | token 16 | index 4 | 0 ×68 | checksum 4
// welcome  hello reply 48 | token 16 | connections 4 | 0 ×8 | checksum 4
// Each checksum covers all that precedes it.
#include "server/transport/tcp/tcp_handshake.h"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <chrono>
#include <utility>

#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

using boost::asio::ip::tcp;

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
  const auto hello = EncodeHello(open.hello);
  std::copy(hello.begin(), hello.end(), preamble.begin());
  LittleEndianWriter writer{std::span(preamble).subspan(kHelloBytes)};
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
  LittleEndianWriter(std::span(preamble).last(4))
      .Put(Checksum(std::span(preamble).first(kPreambleBytes - 4)));
  return preamble;
}

Result<std::variant<TcpOpen, TcpJoin>> DecodePreamble(std::span<const std::byte> bytes) {
  if (bytes.size() != kPreambleBytes || !ChecksumHolds(bytes)) return Garbage("preamble");
  LittleEndianReader reader(bytes);
  if (reader.Take<uint32_t>() == kJoinMagic) {
    TcpJoin join;
    reader.TakeBytes(join.token);
    join.index = reader.Take<uint32_t>();
    return join;
  }
  TcpOpen open;
  WW_ASSIGN(open.hello, DecodeHello(bytes.first(kHelloBytes)));
  open.connections = LittleEndianReader(bytes.subspan(kHelloBytes)).Take<uint32_t>();
  if (open.connections == 0) return Garbage("number of connections");
  return open;
}

std::array<std::byte, kWelcomeBytes> EncodeWelcome(const TcpWelcome& welcome) {
  std::array<std::byte, kWelcomeBytes> message{};
  const auto reply = EncodeHelloReply(welcome.reply);
  std::copy(reply.begin(), reply.end(), message.begin());
  LittleEndianWriter writer{std::span(message).subspan(kHelloReplyBytes)};
  writer.PutBytes(welcome.token);
  writer.Put(welcome.connections);
  writer.Skip(8);
  writer.Put(Checksum(std::span(message).first(kWelcomeBytes - 4)));
  return message;
}

Result<TcpWelcome> DecodeWelcome(std::span<const std::byte> bytes) {
  if (bytes.size() != kWelcomeBytes || !ChecksumHolds(bytes)) return Garbage("welcome");
  TcpWelcome welcome;
  WW_ASSIGN(welcome.reply, DecodeHelloReply(bytes.first(kHelloReplyBytes)));
  LittleEndianReader reader(bytes.subspan(kHelloReplyBytes));
  reader.TakeBytes(welcome.token);
  welcome.connections = reader.Take<uint32_t>();
  if (welcome.connections == 0 || welcome.connections > kTcpConnectionsMax) {
    return Garbage("number of connections");
  }
  return welcome;
}

void Tune(tcp::socket& socket, const TcpOptions& options) {
  boost::system::error_code ignored;  // a socket that broke meanwhile fails at its first use
  socket.set_option(tcp::no_delay(true), ignored);
  socket.set_option(boost::asio::socket_base::keep_alive(true), ignored);
  const auto silence_ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(options.peer_silence_max).count();
  const auto user_timeout_ms = static_cast<unsigned>(silence_ms);
  const int idle_s = std::max(1, static_cast<int>(silence_ms / 2000));
  const int fd = socket.native_handle();
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof(user_timeout_ms));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle_s, sizeof(idle_s));
  if (options.traffic_class == 0) return;
  const int tos = options.traffic_class;
  setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof(tos));  // of v4 addresses on v6 sockets too
  setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &tos, sizeof(tos));
}

bool SendNow(tcp::socket& socket, std::span<const std::byte> message) {
  const ssize_t sent =
      send(socket.native_handle(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(message.size());
}

std::shared_ptr<TcpEndpoint> MakeTcpEndpoint(const std::shared_ptr<TcpCore>& core,
                                             const Hello& hello, std::vector<tcp::socket> sockets) {
  const size_t home = core->NextHome();
  std::vector<std::shared_ptr<TcpConnection>> connections;
  for (size_t i = 0; i < sockets.size(); ++i) {
    IoLoop& loop = core->loop(home + i);
    boost::system::error_code error;
    tcp::socket moved(loop.context());
    const auto local = sockets[i].local_endpoint(error);
    moved.assign(local.protocol(), sockets[i].release(error), error);
    // A socket that could not be moved is closed: reading from it ends the session.
    connections.push_back(std::make_shared<TcpConnection>(*core, loop, std::move(moved)));
  }
  return std::make_shared<TcpEndpoint>(core, hello, std::move(connections));
}

}  // namespace weightwire::transport
