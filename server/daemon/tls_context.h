#pragma once

#include <array>
#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/tls/tls_files.h"
#include "server/tls/watched_file.h"

namespace boost::asio::ssl {
class context;
}  // namespace boost::asio::ssl

namespace weightwire::daemon {

/// TLS 1.3 with the certificate of the process, for either side of a connection. The peer is asked
/// for a certificate of the CA. Belongs to one thread.
class TlsContext {
 public:
  /// Whether a peer may show no certificate.
  enum class Peers { kMayShowNone, kMustShowOne };
  /// `of`: what it is for, in errors.
  TlsContext(const tls::TlsFiles& files, Peers peers, std::string of);

  /// Reads what the files hold now. kInvalidArgument / kConfigInvalid: it cannot serve; what was
  /// there before stays.
  Status Load();
  /// For a connection that begins now: what the files hold, or held when they last fitted. After a
  /// Load that succeeded.
  std::shared_ptr<boost::asio::ssl::context> Get();

 private:
  std::array<tls::WatchedFile, 3> files_;  ///< certificate, key, CA
  const Peers peers_;
  const std::string of_;
  std::array<std::string, 3> texts_;  ///< of context_
  std::shared_ptr<boost::asio::ssl::context> context_;
};

}  // namespace weightwire::daemon
