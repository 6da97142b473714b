#pragma once

#include <memory>
#include <optional>

#include "server/metrics/metrics.h"
#include "server/tls/identity.h"
#include "server/tls/tls_files.h"

namespace grpc {
class CallbackServerContext;
class ServerCredentials;
}  // namespace grpc

namespace weightwire::rpc {

/// Credentials of a server that is `server`. Every call on them is looked at before any service
/// sees it, health, reflection and streams as well: refused are those whose certificate is no
/// identity (UNAUTHENTICATED) or has no right to the method (PERMISSION_DENIED). Counts
/// auth_failures_total{reason="identity"} and authz_denied_total{role,method}. `metrics` outlives
/// them.
std::shared_ptr<grpc::ServerCredentials> GuardedCredentials(const tls::TlsFiles& files,
                                                            tls::Identity server,
                                                            metrics::Sink& metrics);

/// Who calls, as the certificate says; nullopt without TLS, where nobody proves anything. A service
/// sees no call with TLS whose certificate is no identity.
std::optional<tls::Identity> CallerOf(const grpc::CallbackServerContext& context);

}  // namespace weightwire::rpc
