#pragma once

#include <memory>
#include <optional>
#include <string>

#include "server/base/status.h"
#include "server/metrics/metrics.h"
#include "server/tls/identity.h"
#include "server/tls/tls_files.h"
#include "server/tls/token.h"

namespace grpc {
class CallbackServerContext;
class ServerCredentials;
}  // namespace grpc

namespace weightwire::rpc {

/// Credentials of a server that is `server`. Every call on them is looked at before any service
/// sees it, health, reflection and streams as well: refused are those whose certificate is no
/// identity, that have no certificate and no token of `tokens` (both UNAUTHENTICATED), or no right
/// to the method (PERMISSION_DENIED). A certificate counts before a token. Without `tokens` nobody
/// gets a connection without a certificate. Counts auth_failures_total{reason="identity"|"token"}
/// and authz_denied_total{role,method}. `metrics` outlives them.
std::shared_ptr<grpc::ServerCredentials> GuardedCredentials(const tls::TlsFiles& files,
                                                            tls::Identity server,
                                                            std::shared_ptr<tls::TokenKeys> tokens,
                                                            metrics::Sink& metrics);

/// Who calls, as the certificate or the token says; nullopt without TLS, where nobody proves
/// anything. A service sees no call with TLS of which neither is an identity.
std::optional<tls::Identity> CallerOf(const grpc::CallbackServerContext& context);

/// The token by which CallerOf knows the caller; nullopt where that is a certificate, or nothing.
std::optional<tls::Token> TokenOf(const grpc::CallbackServerContext& context);
/// The same token as the call showed it.
std::optional<std::string> TokenTextOf(const grpc::CallbackServerContext& context);

/// kUnauthenticated / kInsecureListener when a token comes without TLS: whoever reads the network
/// has it now.
Status CheckNotExposed(const grpc::CallbackServerContext& context);

}  // namespace weightwire::rpc
