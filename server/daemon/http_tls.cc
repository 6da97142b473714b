#include "server/daemon/http_tls.h"

#include <openssl/ssl.h>
#include <spdlog/spdlog.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/ssl/context.hpp>
#include <utility>

#include "server/rpc/rights.h"
#include "server/tls/certificate.h"

namespace weightwire::daemon {
namespace {

namespace ssl = boost::asio::ssl;

constexpr char kStatusMethod[] = "/weightwire.v1.Coordinator/Status";

Result<std::shared_ptr<ssl::context>> ContextOf(const std::array<std::string, 3>& texts) {
  auto context = std::make_shared<ssl::context>(ssl::context::tls_server);
  boost::system::error_code error;
  auto step = [&error](auto&& act) {
    if (!error) act();
  };
  step([&] { context->use_certificate_chain(boost::asio::buffer(texts[0]), error); });
  step([&] { context->use_private_key(boost::asio::buffer(texts[1]), ssl::context::pem, error); });
  step([&] { context->add_certificate_authority(boost::asio::buffer(texts[2]), error); });
  step([&] { context->set_verify_mode(ssl::verify_peer, error); });
  SSL_CTX* native = context->native_handle();
  if (!error && SSL_CTX_check_private_key(native) == 1 &&
      SSL_CTX_set_min_proto_version(native, TLS1_3_VERSION) == 1) {
    SSL_CTX_set_num_tickets(native, 0);  // a session that is resumed would skip the certificate
    return context;
  }
  return Fail(Code::kInvalidArgument, Reason::kConfigInvalid,
              "tls_cert, tls_key and tls_ca cannot serve the pages: " +
                  (error ? error.message() : "the key is not the certificate's"));
}

}  // namespace

HttpTls::HttpTls(const tls::TlsFiles& files, tls::Identity own, metrics::Sink& metrics)
    : files_{tls::WatchedFile(files.cert), tls::WatchedFile(files.key), tls::WatchedFile(files.ca)},
      own_(std::move(own)),
      metrics_(metrics) {}

Result<std::unique_ptr<HttpTls>> HttpTls::Make(const tls::TlsFiles& files, tls::Identity own,
                                               metrics::Sink& metrics) {
  std::unique_ptr<HttpTls> made(new HttpTls(files, std::move(own), metrics));
  WW_FAIL_IF_ERROR(made->Load());
  return made;
}

Status HttpTls::Load() {
  std::array<std::string, 3> texts;
  for (size_t i = 0; i < texts.size(); ++i) {
    WW_ASSIGN_OR_STATUS(texts[i], files_[i].Read());
  }
  if (context_ && texts == texts_) return OkStatus();
  WW_ASSIGN_OR_STATUS(context_, ContextOf(texts));
  texts_ = std::move(texts);
  return OkStatus();
}

std::shared_ptr<ssl::context> HttpTls::Context() {
  // Key and certificate may just be being replaced; the next connection looks again.
  if (Status loaded = Load(); !loaded.ok()) spdlog::warn("{}", loaded.ToString());
  return context_;
}

Status HttpTls::MaySee(const std::string& path, x509_st* certificate) {
  Status may = Check(path, certificate);
  if (!may.ok()) metrics_.Add("auth_failures_total", 1, {{"reason", "page"}});
  return may;
}

Status HttpTls::Check(const std::string& path, x509_st* certificate) const {
  if (path == "/healthz" || path == "/readyz") return OkStatus();
  if (certificate == nullptr) {
    return Status(Code::kUnauthenticated, Reason::kPermissionDenied,
                  path + " is shown to who has a certificate");
  }
  WW_ASSIGN_OR_STATUS(const tls::Identity caller, tls::IdentityIn(certificate));
  const bool own = caller.domain == own_.domain && caller.ns == own_.ns && caller.job == own_.job;
  if (path == "/metrics" && own && caller.role == tls::Role::kMetrics) return OkStatus();
  return rpc::CheckRight(kStatusMethod, caller, own_);
}

}  // namespace weightwire::daemon
