#include "server/transport/tcp/tcp_stream.h"

#include <sys/socket.h>

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
