#pragma once

#include <memory>

#include "server/base/status.h"

struct ssl_ctx_st;
struct x509_st;

namespace weightwire::transport {

/// Whom a side of tcp under TLS shows itself as, and whom it believes: the daemon makes it of the
/// process's certificate. Used on one thread.
class TlsPeers {
 public:
  virtual ~TlsPeers() = default;
  /// For a socket that begins now, either side of it; never null. It asks the peer for a
  /// certificate and checks it against the CA.
  virtual std::shared_ptr<ssl_ctx_st> Context() = 0;
  /// Whether the owner of `certificate` (null: none was shown), which TLS has checked, may be the
  /// other side of a data session. kUnauthenticated, kPermissionDenied / kPermissionDenied
  virtual Status Check(x509_st* certificate) = 0;
};

}  // namespace weightwire::transport
