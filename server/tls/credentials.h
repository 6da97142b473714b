#pragma once

#include <memory>
#include <string>

#include "server/tls/tls_files.h"

namespace grpc {
class Channel;
class ChannelArguments;
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace weightwire::tls {

/// Both read the files now and again every kReloadSeconds: connections made afterwards use what
/// they hold then, those that are open live on. TLS 1.3 only, in the whole process: the first call
/// sets an environment variable, and belongs before other threads read the environment.

/// A client must show a certificate of the CA; where it may show a token instead, it may show no
/// certificate, but still none that is not good.
enum class Clients { kCertificate, kCertificateOrToken };
std::shared_ptr<grpc::ServerCredentials> ServerCredentials(const TlsFiles& files, Clients clients);

/// Has names resolved by the system (getaddrinfo). c-ares, gRPC's default, closes a socket whose
/// answer fails, and gRPC 1.51 then calls shutdown() on the same number, which may be another
/// thread's socket or listener by then. First in main(): gRPC reads it once, from the environment.
void UseSystemResolver();

/// Opens channels. The server's certificate must be of the CA and have the name that is dialled, or
/// `server_name`. With a token instead of a certificate every call shows what its file holds then;
/// gRPC lets none through on a connection without TLS. Without files: plaintext.
class Dialer {
 public:
  explicit Dialer(const TlsFiles& files);
  std::shared_ptr<grpc::Channel> Open(const std::string& address,
                                      grpc::ChannelArguments arguments) const;

 private:
  std::shared_ptr<grpc::ChannelCredentials> credentials_;  ///< of all its channels: one watch
  std::string server_name_;
};

}  // namespace weightwire::tls
