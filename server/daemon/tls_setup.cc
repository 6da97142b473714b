#include "server/daemon/tls_setup.h"

#include <string>
#include <utility>

#include "server/tls/certificate.h"
#include "server/tls/token.h"

namespace weightwire::daemon {
namespace {

bool Fits(tls::Role role, Role process) {
  if (HasCoordinator(process)) return role == tls::Role::kCoordinator;
  return role == tls::Role::kTrainer || role == tls::Role::kEngine || role == tls::Role::kAgent;
}

/// The key is the coordinator's, so that here the token's claims alone can be looked at.
Result<tls::Identity> IdentityIn(const tls::TlsFiles& files) {
  if (files.token.empty()) {
    WW_ASSIGN(tls::Certificate own, tls::CheckFiles(files));
    return std::move(own.identity);
  }
  WW_ASSIGN(const std::string text, tls::TokenFile(files.token).Text());
  WW_ASSIGN(tls::Token token, tls::ParseToken(text));
  if (token.expires_s <= tls::WallSecondsNow()) return Fail(tls::TokenExpired(token));
  return std::move(token.identity);
}

}  // namespace

Result<std::optional<tls::Identity>> OwnIdentity(const Config& config) {
  const tls::TlsFiles files = TlsFilesOf(config);
  if (!files.given()) return std::nullopt;
  WW_ASSIGN(tls::Identity own, IdentityIn(files));
  if (own.job == config.job && Fits(own.role, config.role)) return own;
  return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                     (files.token.empty() ? files.cert : files.token) + ": " + own.Uri() +
                         " cannot be " + std::string(RoleName(config.role)) + " of job " +
                         config.job)
                  .Remedy(HasCoordinator(config.role)
                              ? "a coordinator's certificate has role coordinator and its job"
                              : "an agent's certificate or token has role trainer, engine or "
                                "agent, and its job"));
}

void SetExpiryGauge(const Config& config, metrics::Sink& metrics) {
  if (config.tls_cert.empty()) return;
  // A file that is being replaced is read again at the next scrape.
  if (auto own = tls::ReadCertificate(config.tls_cert)) {
    metrics.Set("cert_expiry_timestamp_seconds", own->not_after);
  }
}

}  // namespace weightwire::daemon
