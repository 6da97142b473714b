#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "server/metrics/metrics.h"
#include "server/transport/tcp/tls_peers.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

/// What holds off a change of what is sent. A session needs the same on both sides.
enum class Integrity : int {
  kCrc = 1,  ///< checksums of frames, and transfer's sums of payload: against accidents
  kMac =
      2,  ///< a MAC of every frame and payload (frame_mac.h): against who can write to the network
  kTls = 3,  ///< TLS 1.3 with both sides' certificates: against who can read it, too
};

/// Before the address of a transport under TLS, so that a caller sees at once who is not set alike.
inline constexpr std::string_view kTlsPrefix = "tls:";

/// The longest message that a session could be told to carry.
inline constexpr size_t kTcpNotifyBytesMax = 160;

struct TcpOptions {
  std::string bind = "127.0.0.1:0";  ///< "host:port" or "[v6]:port", numeric
  /// Host that peers are told, when it is not the bound one (bind "0.0.0.0:…").
  std::string advertised_host;
  int connections = 4;  ///< sockets of a session that we open, 1 … 16
  /// The same with a peer on this host, where nothing but our threads shares the work; at most
  /// `connections`.
  int near_connections = 2;
  int io_threads = 2;  ///< each serves a share of the sockets
  uint64_t chunk_bytes_max = 64 << 20;
  uint32_t gets_in_flight_max = 64;       ///< per session, ≤ 256
  uint32_t notifies_queued_max = 1024;    ///< per session
  uint32_t inbound_sessions_max = 1024;   ///< a caller is refused while so many sessions are open
  uint32_t inbound_handshakes_max = 256;  ///< accepted sockets that have not introduced themselves
  /// So long such a socket has before another caller may take its place.
  Nanos handshake_grace = std::chrono::milliseconds(250);
  Nanos handshake_timeout =
      std::chrono::seconds(5);  ///< of an inbound session; TLS takes milliseconds of each
  /// A peer that acknowledges nothing for this long, or reads nothing, has gone.
  Nanos peer_silence_max = std::chrono::seconds(30);
  Integrity integrity = Integrity::kCrc;
  std::shared_ptr<TlsPeers> tls_peers = {};  ///< under kTls, and only there
  uint8_t traffic_class = 0;  ///< TOS byte of every data socket; 0: the system's choice
  metrics::Sink* metrics = &metrics::Null();  ///< must outlive the transport
  // Of a transport whose sessions these are, and whose payload goes elsewhere.
  std::string name = "tcp";
  size_t notify_bytes_max = kNotifyBytesMax;  ///< ≤ kTcpNotifyBytesMax
  /// Which notifies notifies_queued_max bounds; null: all.
  bool (*bounds)(std::span<const std::byte> notify) = nullptr;
};

/// Name "tcp". Peers connect by "host:port" (names are resolved), "tls:host:port" under kTls. Only
/// there payload is encrypted; under kCrc it is not checked: that is the business of transfer/.
/// Under kMac and kTls what does not fit its MAC ends the session with kUnavailable /
/// kTransportFailed, and is counted as auth_failures_total{reason="mac"}; its Gets may have been
/// written to, and fail. A caller whose certificate is not good enough is counted with reason
/// "tls".
std::unique_ptr<Transport> MakeTcpTransport(TcpOptions options);

}  // namespace weightwire::transport
