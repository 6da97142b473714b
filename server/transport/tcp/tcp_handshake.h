#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/transport/frame_mac.h"
#include "server/transport/session.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_endpoint.h"
#include "server/transport/tcp/tcp_preamble.h"
#include "server/transport/tcp/tcp_stream.h"

/// How the sockets of a session are set up; what is said on them first: tcp_preamble.h.
namespace weightwire::transport {

/// What every data socket wants: no delay, an end when the peer's host has gone, and no pacing
/// where the peer is on this host. Of a socket that is connected.
void Tune(boost::asio::ip::tcp::socket& socket, const TcpOptions& options);

/// Of a socket that is connected.
bool StaysOnThisHost(const boost::asio::ip::tcp::socket& socket);

/// What this side asks of every session, as bits of `features`.
uint64_t FeaturesOf(const TcpOptions& options);

/// A session over `streams`, each moved to its loop. Not started. `key` is the handshake's, for
/// MACs where the options ask for them.
std::shared_ptr<TcpEndpoint> MakeTcpEndpoint(const std::shared_ptr<TcpCore>& core,
                                             const Hello& hello, const Proof& key, Sender self,
                                             std::vector<TcpStream> streams);

}  // namespace weightwire::transport
