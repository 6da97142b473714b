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
#include <mutex>

namespace weightwire::tls {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

void AllowOnlyTls13() {
  static std::once_flag once;
  std::call_once(once, [] { setenv("GRPC_SSL_CIPHER_SUITES", "PSK-AES256-GCM-SHA384", 1); });
}

std::shared_ptr<FileWatcherCertificateProvider> Watch(const TlsFiles& files) {
  AllowOnlyTls13();
  return std::make_shared<FileWatcherCertificateProvider>(files.key, files.cert, files.ca,
                                                          kReloadSeconds);
}

}  // namespace

std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsFiles& files) {
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
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
  options.watch_identity_key_cert_pairs();
  credentials_ = grpc::experimental::TlsCredentials(options);
}

std::shared_ptr<grpc::Channel> Dialer::Open(const std::string& address,
                                            grpc::ChannelArguments arguments) const {
  if (!server_name_.empty()) arguments.SetSslTargetNameOverride(server_name_);
  return grpc::CreateCustomChannel(address, credentials_, arguments);
}

}  // namespace weightwire::tls
