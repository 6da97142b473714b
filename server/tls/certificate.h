#pragma once

#include <string>

#include "server/base/status.h"
#include "server/tls/identity.h"
#include "server/tls/tls_files.h"

namespace weightwire::tls {

struct Certificate {
  Identity identity;
  double not_after = 0;  ///< seconds since the Unix epoch
};

/// The leaf in the PEM file `path`.
///   kInvalidArgument / kConfigInvalid       not readable, no certificate
///   kUnauthenticated / kPermissionDenied    its URI SANs are not one identity of weightwire's
Result<Certificate> ReadCertificate(const std::string& path);

/// That the files can serve now: the leaf as above, the key is its, it is of the CA and has not
/// expired. kInvalidArgument / kConfigInvalid names the file.
Result<Certificate> CheckFiles(const TlsFiles& files);

}  // namespace weightwire::tls
