#pragma once

#include <string>

#include "server/base/status.h"
#include "server/tls/identity.h"
#include "server/tls/tls_files.h"

struct x509_st;

namespace weightwire::tls {

struct Certificate {
  Identity identity;
  double not_after = 0;  ///< seconds since the Unix epoch
};

/// Who the owner of `certificate` is.
///   kUnauthenticated / kPermissionDenied    its URI SANs are not one identity of weightwire's
Result<Identity> IdentityIn(x509_st* certificate);

/// The leaf in the PEM file `path`.
///   kInvalidArgument / kConfigInvalid       not readable, no certificate
///   kUnauthenticated / kPermissionDenied    its URI SANs are not one identity of weightwire's
Result<Certificate> ReadCertificate(const std::string& path);

/// That the file `path` holds a certificate. kInvalidArgument / kConfigInvalid names the file.
Status CheckCertificate(const std::string& path);

/// That the file `key` holds the key of the certificate in `cert`. As above.
Status CheckKeyOf(const std::string& cert, const std::string& key);

/// That the files can serve now: the leaf as above, the key is its, it is of the CA and has not
/// expired. kInvalidArgument / kConfigInvalid names the file.
Result<Certificate> CheckFiles(const TlsFiles& files);

}  // namespace weightwire::tls
