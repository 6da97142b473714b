#pragma once

#include <optional>

#include "server/base/status.h"
#include "server/daemon/config.h"
#include "server/metrics/metrics.h"
#include "server/tls/identity.h"

namespace weightwire::daemon {

/// Who this process is; nullopt without TLS. Refused are files that could not serve, and an
/// identity that is not of config.job or may not be what config.role says.
///   kInvalidArgument / kConfigInvalid, kUnauthenticated / kPermissionDenied
Result<std::optional<tls::Identity>> OwnIdentity(const Config& config);

/// Sets cert_expiry_timestamp_seconds from the file as it is now; not without TLS.
void SetExpiryGauge(const Config& config, metrics::Sink& metrics);

}  // namespace weightwire::daemon
