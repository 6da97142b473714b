// gRPC 1.51 takes TLS 1.2 and 1.3 and has no setting for it. It has one for the suites of TLS 1.2;
// what is left of that version below is a suite with a pre-shared key, which neither side has, so
// that no handshake of it can succeed. The suites of TLS 1.3 are another list.
#include "server/tls/credentials.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "server/tls/token.h"

namespace weightwire::tls {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

void AllowOnlyTls13() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("GRPC_SSL_CIPHER_SUITES", "PSK-AES256-GCM-SHA384", 1); });
}

std::shared_ptr<FileWatcherCertificateProvider> Watch(const TlsFiles& files) {
  AllowOnlyTls13();
  if (files.cert.empty()) {
    return std::make_shared<FileWatcherCertificateProvider>(files.ca, kReloadSeconds);
  }
  return std::make_shared<FileWatcherCertificateProvider>(files.key, files.cert, files.ca,
                                                          kReloadSeconds);
}

class ShowsToken final : public grpc::MetadataCredentialsPlugin {
 public:
  explicit ShowsToken(std::string path) : file_(std::move(path)) {}
  bool IsBlocking() const override { return false; }  // a stat, and now and then a line

  grpc::Status GetMetadata(grpc::string_ref, grpc::string_ref, const grpc::AuthContext&,
                           std::multimap<grpc::string, grpc::string>* metadata) override {
    auto token = file_.Text();
    if (!token) return grpc::Status(grpc::StatusCode::UNAUTHENTICATED, token.error().message());
    metadata->emplace(kTokenMetadata, std::move(*token));
    return grpc::Status::OK;
  }

 private:
  TokenFile file_;
};

}  // namespace

void UseSystemResolver() { setenv("GRPC_DNS_RESOLVER", "native", /*overwrite=*/0); }

std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsFiles& files, Clients clients) {
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(clients == Clients::kCertificate
                                    ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_REQUEST_CLIENT_CERTIFICATE_AND_VERIFY);
  return grpc::experimental::TlsServerCredentials(options);
}

Dialer::Dialer(const TlsFiles& files) : server_name_(files.server_name) {
  if (!files.given()) {
    credentials_ = grpc::InsecureChannelCredentials();
    return;
  }
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(files));
  options.watch_root_certs();
  if (!files.cert.empty()) options.watch_identity_key_cert_pairs();
  credentials_ = grpc::experimental::TlsCredentials(options);
  if (files.token.empty()) return;
  credentials_ = grpc::CompositeChannelCredentials(
      credentials_, grpc::MetadataCredentialsFromPlugin(std::make_unique<ShowsToken>(files.token)));
}

std::shared_ptr<grpc::Channel> Dialer::Open(const std::string& address,
                                            grpc::ChannelArguments arguments) const {
  if (!server_name_.empty()) arguments.SetSslTargetNameOverride(server_name_);
  return grpc::CreateCustomChannel(address, credentials_, arguments);
}

}  // namespace weightwire::tls
