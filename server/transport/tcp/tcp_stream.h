#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>

#include "server/transport/tcp/tls_socket.h"

namespace weightwire::transport {

/// A data socket, in the open or under TLS: what boost::asio::async_read and async_write take.
/// Stays where it is while an operation is under way, and lives until that has ended; after Close
/// operations end with an error and touch no buffer.
class TcpStream {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using executor_type = Socket::executor_type;
  explicit TcpStream(boost::asio::io_context& context) : socket_(context) {}
  explicit TcpStream(Socket socket) : socket_(std::move(socket)) {}

  /// To connect it, to look at it, to set options.
  Socket& socket() { return socket_; }
  executor_type get_executor() { return socket_.get_executor(); }
  bool is_open() const { return socket_.is_open(); }
  void Close();
  /// The same socket on another loop; closed where that failed.
  TcpStream MovedTo(boost::asio::io_context& context);

  /// Sends a short message on a fresh socket, whose buffer is empty: it goes at once or not at all.
  bool SendNow(std::span<const std::byte> message);

  /// TLS from here on; before anything else is sent or read. `handler(error)`.
  template <typename Handler>
  void AsyncSecure(ssl_ctx_st* context, TlsSocket::Side side, Handler handler) {
    boost::system::error_code error;
    socket_.native_non_blocking(true, error);
    tls_ = std::make_unique<TlsSocket>(context, side, socket_.native_handle());
    Drive([tls = tls_.get()](size_t*, boost::system::error_code* e) { return tls->Handshake(e); },
          [handler = std::move(handler)](const boost::system::error_code& e, size_t) mutable {
            handler(e);
          },
          /*inside=*/false);
  }
  /// After AsyncSecure.
  Status CheckPeer(TlsPeers& peers) const { return tls_->CheckPeer(peers); }

  /// Reads what is there, at most `into`, and answers how much. `error`: of what comes after that.
  size_t ReadNow(std::span<std::byte> into, boost::system::error_code* error);
  /// `handler(error)` when ReadNow, which found less than it was asked for, may find more.
  template <typename Handler>
  void AsyncReadable(Handler&& handler) {
    socket_.async_wait(read_needs_ == TlsNeeds::kWritable ? Socket::wait_write : Socket::wait_read,
                       std::forward<Handler>(handler));
  }

  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (tls_ == nullptr) {
      return socket_.async_read_some(buffers, std::forward<Handler>(handler));
    }
    Drive(
        [tls = tls_.get(), buffers](size_t* bytes, boost::system::error_code* error) {
          return ReadInto(*tls, buffers, bytes, error);
        },
        std::forward<Handler>(handler), /*inside=*/false);
  }

  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (tls_ == nullptr) {
      return socket_.async_write_some(buffers, std::forward<Handler>(handler));
    }
    size_t staged = 0;
    // Asio goes on with what is left of a write whatever happened meanwhile: after Close the
    // buffers may be gone.
    auto it = socket_.is_open() ? boost::asio::buffer_sequence_begin(buffers)
                                : boost::asio::buffer_sequence_end(buffers);
    for (; it != boost::asio::buffer_sequence_end(buffers); ++it) {
      const boost::asio::const_buffer piece(*it);
      const size_t taken = tls_->Stage({static_cast<const std::byte*>(piece.data()), piece.size()});
      staged += taken;
      if (taken < piece.size()) break;
    }
    Drive(
        [tls = tls_.get(), staged](size_t* bytes, boost::system::error_code* error) {
          const TlsNeeds needs = tls->Flush(error);
          if (needs == TlsNeeds::kNothing && !*error) *bytes = staged;
          return needs;
        },
        std::forward<Handler>(handler), /*inside=*/false);
  }

 private:
  template <typename Buffers>
  static TlsNeeds ReadInto(TlsSocket& tls, const Buffers& buffers, size_t* bytes,
                           boost::system::error_code* error) {
    for (auto it = boost::asio::buffer_sequence_begin(buffers);
         it != boost::asio::buffer_sequence_end(buffers); ++it) {
      const boost::asio::mutable_buffer into(*it);
      const TlsNeeds needs =
          ReadAll(tls, {static_cast<std::byte*>(into.data()), into.size()}, bytes, error);
      if (needs == TlsNeeds::kNothing && !*error) continue;
      if (*bytes == 0) return needs;
      *error = {};  // it stays, and comes again
      return TlsNeeds::kNothing;
    }
    return TlsNeeds::kNothing;
  }

  /// Until `into` is full (kNothing, no error), or as Read says. `bytes`: so many more.
  static TlsNeeds ReadAll(TlsSocket& tls, std::span<std::byte> into, size_t* bytes,
                          boost::system::error_code* error);

  /// Takes `step` now and whenever the socket has become what it needs, until it needs nothing.
  /// `inside`: a handler may be called from here.
  template <typename Step, typename Handler>
  void Drive(Step step, Handler handler, bool inside) {
    boost::system::error_code error;
    size_t bytes = 0;
    TlsNeeds needs = TlsNeeds::kNothing;
    if (socket_.is_open()) {
      needs = step(&bytes, &error);
    } else {
      error = boost::asio::error::operation_aborted;
    }
    if (needs == TlsNeeds::kNothing) {
      if (inside) return handler(error, bytes);
      return boost::asio::post(get_executor(), [handler = std::move(handler), error,
                                                bytes]() mutable { handler(error, bytes); });
    }
    const auto wanted = needs == TlsNeeds::kReadable ? Socket::wait_read : Socket::wait_write;
    socket_.async_wait(wanted, [this, step = std::move(step), handler = std::move(handler)](
                                   const boost::system::error_code& failed) mutable {
      if (failed) return handler(failed, 0);
      Drive(std::move(step), std::move(handler), /*inside=*/true);
    });
  }

  Socket socket_;
  std::unique_ptr<TlsSocket> tls_;  ///< null: in the open
  TlsNeeds read_needs_ = TlsNeeds::kReadable;
};

}  // namespace weightwire::transport
