#include "server/transport/tcp/tcp_stream.h"

#include <sys/socket.h>

#include <boost/asio/error.hpp>
#include <cerrno>

namespace weightwire::transport {

using boost::system::error_code;

void TcpStream::Close() {
  error_code ignored;
  socket_.close(ignored);
}

TcpStream TcpStream::MovedTo(boost::asio::io_context& context) {
  error_code error;
  TcpStream moved(context);
  const auto local = socket_.local_endpoint(error);
  moved.socket_.assign(local.protocol(), socket_.release(error), error);
  moved.tls_ = std::move(tls_);
  return moved;
}

size_t TcpStream::ReadNow(std::span<std::byte> into, error_code* error) {
  *error = {};
  if (!socket_.is_open()) {
    *error = boost::asio::error::operation_aborted;
    return 0;
  }
  if (tls_ == nullptr) {
    const ssize_t got = recv(socket_.native_handle(), into.data(), into.size(), MSG_DONTWAIT);
    if (got > 0) return static_cast<size_t>(got);
    if (got == 0) {
      *error = boost::asio::error::eof;
    } else if (errno != EAGAIN && errno != EINTR) {
      error->assign(errno, boost::system::system_category());
    }
    return 0;
  }
  size_t bytes = 0;
  read_needs_ = ReadAll(*tls_, into, &bytes, error);
  return bytes;
}

TlsNeeds TcpStream::ReadAll(TlsSocket& tls, std::span<std::byte> into, size_t* bytes,
                            error_code* error) {
  while (!into.empty()) {
    size_t got = 0;
    const TlsNeeds needs = tls.Read(into, &got, error);
    *bytes += got;
    into = into.subspan(got);
    if (got == 0) return needs;
  }
  return TlsNeeds::kNothing;
}

bool TcpStream::SendNow(std::span<const std::byte> message) {
  if (tls_ != nullptr) {
    error_code error;
    return tls_->Stage(message) == message.size() && tls_->Flush(&error) == TlsNeeds::kNothing &&
           !error;
  }
  const ssize_t sent =
      send(socket_.native_handle(), message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(message.size());
}

}  // namespace weightwire::transport
