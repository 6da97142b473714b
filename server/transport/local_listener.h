#pragma once

#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "server/transport/handshake.h"
#include "server/transport/local_core.h"
#include "server/transport/local_stream.h"

namespace weightwire::transport {

/// Makes sessions: accepts callers and calls peers. After Open everything runs on the loop.
class LocalListener final : public std::enable_shared_from_this<LocalListener> {
 public:
  explicit LocalListener(std::shared_ptr<LocalCore> core);
  /// Binds and starts to accept. kUnavailable / kIoError naming the address.
  Status Open();
  const std::string& address() const { return address_; }
  void Call(const std::string& address, const Hello& hello, Nanos deadline,
            Transport::ConnectDone done);
  /// Drops what has not become a session, answers the calls. No session is made afterwards.
  void Stop();

 private:
  /// A socket before its session, accepted or called.
  struct PendingConnection {
    PendingConnection(std::shared_ptr<LocalStream> the_stream, boost::asio::io_context& context);
    std::shared_ptr<LocalStream> stream;
    boost::asio::steady_timer timer;
    std::optional<CalleeHandshake> handshake;  ///< of an accepted one that introduced itself
    Transport::ConnectDone done;               ///< of a call
    std::optional<CallerHandshake> calling;    ///< likewise
    bool proved = false;                       ///< likewise: and answered
  };
  using Socket = LocalStream::Socket;

  void Accept();
  void OnAcceptError(int error);
  void Accept(Socket socket);
  Result<size_t> OnCallerHello(const std::shared_ptr<PendingConnection>& pending,
                               std::span<const std::byte> unread);
  Result<size_t> OnProof(const std::shared_ptr<PendingConnection>& pending,
                         std::span<const std::byte> unread);
  /// A session for the pending connection, or the refusal that `reply` is; `check` as in
  /// CountRefused.
  void Conclude(const std::shared_ptr<PendingConnection>& pending, CalleeReply reply,
                const char* check);
  Result<size_t> OnCalleeProof(const std::shared_ptr<PendingConnection>& pending,
                               std::span<const std::byte> unread);
  Result<size_t> OnCalleeReply(const std::shared_ptr<PendingConnection>& pending,
                               std::span<const std::byte> unread);
  /// `cause` counts the end of an accepted one.
  void Drop(const std::shared_ptr<PendingConnection>& pending, Status why, const char* cause);
  /// Shows the counts and accepts again where the bound had stopped it.
  void VisitorsChanged();

  const std::shared_ptr<LocalCore> core_;
  boost::asio::local::stream_protocol::acceptor acceptor_;
  boost::asio::steady_timer retry_;  ///< accepting again after it failed
  std::string address_;
  bool owns_path_ = false;
  bool accepting_ = false;
  bool stopped_ = false;
  std::set<std::shared_ptr<PendingConnection>> pending_;  ///< accepted
  std::set<std::shared_ptr<PendingConnection>> calls_;
};

}  // namespace weightwire::transport
