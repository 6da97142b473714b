#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
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
/// of them. After Open everything runs on loop 0.
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
  struct Visitor {
    explicit Visitor(boost::asio::ip::tcp::socket socket);
    TcpStream stream;
    boost::asio::steady_timer timer;
    Preamble preamble{};
    uint32_t connections = 0;  ///< wanted
    std::optional<CalleeHandshake> handshake;
    std::array<std::byte, kProofBytes> proof{};
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
  void Welcome(boost::asio::ip::tcp::socket socket);
  void OnSecured(const std::shared_ptr<Visitor>& visitor, const boost::system::error_code& error);
  void ReadPreamble(const std::shared_ptr<Visitor>& visitor);
  void Drop(const std::shared_ptr<Visitor>& visitor, const char* cause);
  void OnPreamble(const std::shared_ptr<Visitor>& visitor);
  void OnOpen(const std::shared_ptr<Visitor>& visitor, const TcpOpen& open);
  void OnProof(const std::shared_ptr<Visitor>& visitor);
  /// A session for the visitor, or the refusal that `reply` is; `check` as in CountRefused.
  void Conclude(const std::shared_ptr<Visitor>& visitor, HelloReply reply, const char* check);
  static bool MayJoin(const Opening& opening, const TcpJoin& join);
  void OnJoin(const TcpJoin& join, TcpStream stream);
  /// It is a visitor no more.
  TcpStream Leave(const std::shared_ptr<Visitor>& visitor);
  void Complete(const SessionToken& token);
  /// Shows the counts and accepts again where the bound had stopped it.
  void VisitorsChanged();

  const std::shared_ptr<TcpCore> core_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer retry_;  ///< accepting again after it failed
  std::string address_;
  bool accepting_ = false;
  bool stopped_ = false;
  std::set<std::shared_ptr<Visitor>> visitors_;
  std::map<SessionToken, std::unique_ptr<Opening>> openings_;
};

}  // namespace weightwire::transport
