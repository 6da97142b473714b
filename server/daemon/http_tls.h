#pragma once

#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/daemon/tls_context.h"
#include "server/metrics/metrics.h"
#include "server/tls/identity.h"
#include "server/tls/tls_files.h"

struct x509_st;
namespace weightwire::daemon {

/// TLS 1.3 of the pages, with the certificate of the process; and who may see which. A client is
/// asked for a certificate and may go without, as probes do; one that is not of the CA, or has
/// expired, ends the handshake. Belongs to the thread of the HTTP server.
class HttpTls {
 public:
  /// kInvalidArgument / kConfigInvalid: files that cannot serve. `metrics` outlives it.
  static Result<std::unique_ptr<HttpTls>> Make(const tls::TlsFiles& files, tls::Identity own,
                                               metrics::Sink& metrics);

  /// Of a connection that begins now: what the files hold, or held when they last fitted.
  std::shared_ptr<boost::asio::ssl::context> Context();

  /// Whether who shows `certificate` (null: none), which TLS has checked, may see `path`:
  /// /healthz and /readyz everybody; all pages who may call Status (rights.h); /metrics also role
  /// metrics of the job. Refusals are counted as auth_failures_total{reason="page"}.
  ///   kUnauthenticated, kPermissionDenied / kPermissionDenied
  Status MaySee(const std::string& path, x509_st* certificate);

 private:
  HttpTls(const tls::TlsFiles& files, tls::Identity own, metrics::Sink& metrics);
  Status Check(const std::string& path, x509_st* certificate) const;

  TlsContext context_;
  const tls::Identity own_;
  metrics::Sink& metrics_;
};

}  // namespace weightwire::daemon
