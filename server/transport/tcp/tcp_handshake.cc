#include "server/transport/tcp/tcp_handshake.h"

#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <chrono>
#include <optional>
#include <utility>

namespace weightwire::transport {

using boost::asio::ip::tcp;

bool StaysOnThisHost(const tcp::socket& socket) {
  boost::system::error_code error;
  const auto peer = socket.remote_endpoint(error).address();
  if (error) return false;
  return peer.is_loopback() || peer == socket.local_endpoint(error).address();
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
  // Between processes of one host there is no path to be found out or shared. What paces for that
  // (BBR) lets a timer send: a sixth of a raw socket's time over loopback
  // (docs/history/performance.md). "reno" is in every kernel and allowed to everybody.
  if (StaysOnThisHost(socket)) setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  if (options.traffic_class == 0) return;
  const int tos = options.traffic_class;
  setsockopt(fd, IPPROTO_IP, IP_TOS, &tos, sizeof(tos));  // of v4 addresses on v6 sockets too
  setsockopt(fd, IPPROTO_IPV6, IPV6_TCLASS, &tos, sizeof(tos));
}

uint64_t FeaturesOf(const TcpOptions& options) {
  return options.integrity == Integrity::kMac ? kFeatureMac : 0;
}

std::shared_ptr<TcpEndpoint> MakeTcpEndpoint(const std::shared_ptr<TcpCore>& core,
                                             const Hello& hello, const Proof& key, Sender self,
                                             std::vector<TcpStream> streams) {
  const size_t home = core->NextHome();
  std::vector<std::shared_ptr<TcpConnection>> connections;
  for (size_t i = 0; i < streams.size(); ++i) {
    IoLoop& loop = core->loop(home + i);
    // One that could not be moved is closed: reading from it ends the session.
    TcpStream moved = streams[i].MovedTo(loop.context());
    std::optional<FrameMacs> macs;
    if (core->options.integrity == Integrity::kMac) macs.emplace(key, self, i);
    connections.push_back(
        std::make_shared<TcpConnection>(*core, loop, std::move(moved), std::move(macs)));
  }
  return std::make_shared<TcpEndpoint>(core, hello, std::move(connections));
}

}  // namespace weightwire::transport
