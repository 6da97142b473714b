#include "server/daemon/tls_context.h"

#include <openssl/ssl.h>
#include <spdlog/spdlog.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>
#include <utility>

namespace weightwire::daemon {
namespace {

namespace ssl = boost::asio::ssl;

Result<std::shared_ptr<ssl::context>> ContextOf(const std::array<std::string, 3>& texts,
                                                ssl::verify_mode verify, const std::string& of) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls);
  boost::system::error_code error;
  auto step = [&error](auto&& act) {
    if (!error) act();
  };
  step([&] { context->use_certificate_chain(boost::asio::buffer(texts[0]), error); });
  step([&] { context->use_private_key(boost::asio::buffer(texts[1]), ssl::context::pem, error); });
  step([&] { context->add_certificate_authority(boost::asio::buffer(texts[2]), error); });
  step([&] { context->set_verify_mode(verify, error); });
  SSL_CTX* native = context->native_handle();
  if (!error && SSL_CTX_check_private_key(native) == 1 &&
      SSL_CTX_set_min_proto_version(native, TLS1_3_VERSION) == 1) {
    SSL_CTX_set_num_tickets(native, 0);  // a session that is resumed would skip the certificate
    return context;
  }
  return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
              "tls_cert, tls_key and tls_ca cannot serve " + of + ": " +
                  (error ? error.message() : "the key is not the certificate's"));
}

}  // namespace

TlsContext::TlsContext(const tls::TlsFiles& files, Peers peers, std::string of)
    : files_{tls::WatchedFile(files.cert), tls::WatchedFile(files.key), tls::WatchedFile(files.ca)},
      peers_(peers),
      of_(std::move(of)) {}

Status TlsContext::Load() {
  std::array<std::string, 3> texts;
  for (size_t i = 0; i < texts.size(); ++i) {
    WW_ASSIGN_OR_STATUS(texts[i], files_[i].Read());
  }
  if (context_ && texts == texts_) return OkStatus();
  const ssl::verify_mode must =
      peers_ == Peers::kMustShowOne ? ssl::verify_fail_if_no_peer_cert : 0;
  WW_ASSIGN_OR_STATUS(context_, ContextOf(texts, ssl::verify_peer | must, of_));
  texts_ = std::move(texts);
  return OkStatus();
}

std::shared_ptr<ssl::context> TlsContext::Get() {
  // Key and certificate may just be being replaced; the next connection looks again.
  if (Status loaded = Load(); !loaded.ok()) spdlog::warn("{}", loaded.ToString());
  return context_;
}

}  // namespace weightwire::daemon
