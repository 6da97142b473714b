#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/transport/handshake.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_handshake.h"

namespace weightwire::transport {

/// Accepts sockets, lets them introduce themselves within the handshake timeout, and makes sessions
/// of them. Where as many are pending as may be, the oldest of the address that has most of them
/// makes room, once it had its handshake_grace. After Open everything runs on loop 0 but TLS's
/// handshakes, which are spread over the loops.
class TcpListener final : public std::enable_shared_from_this<TcpListener> {
 public:
  explicit TcpListener(std::shared_ptr<TcpCore> core);
  /// Binds and starts to accept. kUnavailable / kIoError naming the address.
  Status Open();
  std::string address() const { return address_; }
  /// Drops what has not become a session. No session is made afterwards.
  void Stop();

 private:
  /// An accepted socket that has not introduced itself, or not proved what it said.
  struct PendingConnection {
    explicit PendingConnection(boost::asio::ip::tcp::socket socket);
    TcpStream stream;
    boost::asio::steady_timer timer;
    const std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    boost::asio::ip::address remote;
    IoLoop* securing = nullptr;  ///< while TLS's handshake runs: the loop that alone may touch it
    Preamble preamble{};
    uint32_t connections = 0;  ///< wanted
    std::optional<CalleeHandshake> handshake;
    std::array<std::byte, kCallerProofBytes> proof{};
  };
  /// A session that misses sockets.
  struct Opening {
    Opening(boost::asio::io_context& context, CalleeHandshake the_handshake, size_t count);
    CalleeHandshake handshake;
    std::vector<TcpStream> streams;  ///< closed ones are missing
    size_t missing = 0;
    boost::asio::steady_timer timer;
  };

  void Accept();
  void OnAcceptError(const boost::system::error_code& error);
  void AcceptAfter(std::chrono::steady_clock::duration pause);
  /// Who makes room for one more; there are pending connections.
  std::shared_ptr<PendingConnection> NextToLeave() const;
  void Accept(boost::asio::ip::tcp::socket socket);
  void Secure(const std::shared_ptr<PendingConnection>& pending);
  void OnSecured(const std::shared_ptr<PendingConnection>& pending,
                 const boost::system::error_code& error);
  void ReadPreamble(const std::shared_ptr<PendingConnection>& pending);
  void Drop(const std::shared_ptr<PendingConnection>& pending, const char* cause);
  void OnPreamble(const std::shared_ptr<PendingConnection>& pending);
  void OnOpen(const std::shared_ptr<PendingConnection>& pending, const TcpOpen& open);
  void OnProof(const std::shared_ptr<PendingConnection>& pending);
  /// A session for the pending connection, or the refusal that `reply` is; `check` as in
  /// CountRefused.
  void Conclude(const std::shared_ptr<PendingConnection>& pending, CalleeReply reply,
                const char* check);
  static bool MayJoin(const Opening& opening, const TcpJoin& join);
  void OnJoin(const TcpJoin& join, TcpStream stream);
  static void Close(const std::shared_ptr<PendingConnection>& pending);
  /// It is a pending connection no more.
  TcpStream Leave(const std::shared_ptr<PendingConnection>& pending);
  void Complete(const SessionToken& token);
  /// Shows the counts and accepts again where the bound had stopped it.
  void VisitorsChanged();

  const std::shared_ptr<TcpCore> core_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer retry_;  ///< accepting again after it failed
  std::string address_;
  bool accepting_ = false;
  bool stopped_ = false;
  std::set<std::shared_ptr<PendingConnection>> pending_;
  std::map<SessionToken, std::unique_ptr<Opening>> openings_;
};

}  // namespace weightwire::transport
