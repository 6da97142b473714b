#include "server/transport/tcp/tls_socket.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <algorithm>
#include <boost/asio/error.hpp>
#include <boost/asio/ssl/error.hpp>
#include <cerrno>

namespace weightwire::transport {
namespace {

using boost::system::error_code;

/// Of one call of the kernel: several records.
constexpr size_t kReadBufferBytes = 256 << 10;
/// The fastest first, on processors with AES: docs/history/performance.md.
constexpr char kSuites[] =
    "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

}  // namespace

TlsSocket::TlsSocket(ssl_ctx_st* context, Side side, int fd) : ssl_(SSL_new(context), SSL_free) {
  WW_CHECK(ssl_ != nullptr && SSL_set_fd(ssl_.get(), fd) == 1);
  // The end of a session says enough: frames tell what is missing.
  SSL_set_options(ssl_.get(), SSL_OP_ENABLE_KTLS | SSL_OP_IGNORE_UNEXPECTED_EOF);
  SSL_set_mode(ssl_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE);
  WW_CHECK(SSL_set_ciphersuites(ssl_.get(), kSuites) == 1);
  SSL_set_read_ahead(ssl_.get(), 1);
  SSL_set_default_read_buffer_len(ssl_.get(), kReadBufferBytes);
  if (side == Side::kCaller) {
    SSL_set_connect_state(ssl_.get());
  } else {
    SSL_set_accept_state(ssl_.get());
  }
  stage_.reserve(kStageBytes);
}

TlsSocket::~TlsSocket() = default;

bool TlsSocket::IsForgery(const error_code& error) {
  // What the peer says that it has found is at home with the peer.
  return error.category() == boost::asio::error::get_ssl_category() &&
         ERR_GET_REASON(static_cast<unsigned long>(error.value())) < SSL_AD_REASON_OFFSET;
}

TlsNeeds TlsSocket::Handshake(error_code* error) {
  ERR_clear_error();
  return Explain(SSL_do_handshake(ssl_.get()), error);
}

TlsNeeds TlsSocket::Read(std::span<std::byte> into, size_t* got, error_code* error) {
  *got = 0;
  if ((*error = failed_) || into.empty()) return TlsNeeds::kNothing;
  ERR_clear_error();
  return Explain(SSL_read_ex(ssl_.get(), into.data(), into.size(), got), error);
}

TlsNeeds TlsSocket::Flush(error_code* error) {
  if ((*error = failed_)) return TlsNeeds::kNothing;
  while (flushed_ < stage_.size()) {
    size_t sent = 0;
    ERR_clear_error();
    const TlsNeeds needs = Explain(
        SSL_write_ex(ssl_.get(), stage_.data() + flushed_, stage_.size() - flushed_, &sent), error);
    if (needs != TlsNeeds::kNothing || *error) return needs;
    flushed_ += sent;
  }
  stage_.clear();
  flushed_ = 0;
  return TlsNeeds::kNothing;
}

size_t TlsSocket::Stage(std::span<const std::byte> bytes) {
  const size_t taken = std::min(bytes.size(), kStageBytes - stage_.size());
  stage_.insert(stage_.end(), bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(taken));
  return taken;
}

Status TlsSocket::CheckPeer(TlsPeers& peers) const {
  const std::unique_ptr<X509, void (*)(X509*)> shown(SSL_get1_peer_certificate(ssl_.get()),
                                                     X509_free);
  return peers.Check(shown.get());
}

TlsNeeds TlsSocket::Explain(int result, error_code* error) {
  *error = {};
  if (result == 1) return TlsNeeds::kNothing;
  const int system = errno;
  switch (SSL_get_error(ssl_.get(), result)) {
    case SSL_ERROR_WANT_READ:
      return TlsNeeds::kReadable;
    case SSL_ERROR_WANT_WRITE:
      return TlsNeeds::kWritable;
    case SSL_ERROR_ZERO_RETURN:
      failed_ = boost::asio::error::eof;
      break;
    case SSL_ERROR_SYSCALL:
      failed_ = system == 0 ? error_code(boost::asio::error::eof)
                            : error_code(system, boost::system::system_category());
      break;
    default:
      failed_ = {static_cast<int>(ERR_get_error()), boost::asio::error::get_ssl_category()};
  }
  *error = failed_;
  return TlsNeeds::kNothing;
}

}  // namespace weightwire::transport
