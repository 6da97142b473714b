#pragma once

#include <memory>

#include "server/base/status.h"
#include "server/daemon/tls_context.h"
#include "server/tls/identity.h"
#include "server/transport/tcp/tls_peers.h"

namespace weightwire::daemon {

/// The data plane under `integrity: tls`, with the certificate of the process. The other side is an
/// agent of the same job: a certificate of its trust domain, namespace and job, and of a role that
/// has an agent.
class DataTls final : public transport::TlsPeers {
 public:
  /// kInvalidArgument / kConfigInvalid: files that cannot serve.
  static Result<std::shared_ptr<DataTls>> Make(const tls::TlsFiles& files, tls::Identity own);

  std::shared_ptr<ssl_ctx_st> Context() override;
  Status Check(x509_st* certificate) override;

 private:
  DataTls(const tls::TlsFiles& files, tls::Identity own);

  TlsContext context_;
  const tls::Identity own_;
};

}  // namespace weightwire::daemon
