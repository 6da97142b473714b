#include "server/daemon/tls_setup.h"

#include <string>
#include <utility>

#include "server/tls/certificate.h"

namespace weightwire::daemon {
namespace {

bool Fits(tls::Role role, Role process) {
  if (HasCoordinator(process)) return role == tls::Role::kCoordinator;
  return role == tls::Role::kTrainer || role == tls::Role::kEngine || role == tls::Role::kAgent;
}

}  // namespace

Result<std::optional<tls::Identity>> OwnIdentity(const Config& config) {
  const tls::TlsFiles files = TlsFilesOf(config);
  if (!files.given()) return std::nullopt;
  WW_ASSIGN(tls::Certificate own, tls::CheckFiles(files));
  if (own.identity.job == config.job && Fits(own.identity.role, config.role)) {
    return std::move(own.identity);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                     files.cert + ": " + own.identity.Uri() + " cannot be " +
                         std::string(RoleName(config.role)) + " of job " + config.job)
                  .Remedy(HasCoordinator(config.role)
                              ? "a coordinator's certificate has role coordinator and its job"
                              : "an agent's certificate has role trainer, engine or agent, and "
                                "its job"));
}

void SetExpiryGauge(const Config& config, metrics::Sink& metrics) {
  if (config.tls_cert.empty()) return;
  // A file that is being replaced is read again at the next scrape.
  if (auto own = tls::ReadCertificate(config.tls_cert)) {
    metrics.Set("cert_expiry_timestamp_seconds", own->not_after);
  }
}

}  // namespace weightwire::daemon
