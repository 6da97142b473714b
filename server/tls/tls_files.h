#pragma once

#include <string>

namespace weightwire::tls {

/// The PEM files by which a process proves who it is and checks who others are. They may change
/// while it runs: whoever made credentials of them looks every kReloadSeconds.
struct TlsFiles {
  std::string cert;  ///< own chain, the leaf first
  std::string key;   ///< of the leaf, PKCS#8
  std::string ca;    ///< whose certificates are believed
  /// Name that a server's certificate must have, where it is not the one that was dialled.
  std::string server_name;
  /// Instead of cert and key: a file with a job token (token.h), which a client shows.
  std::string token;

  /// TLS is spoken.
  bool given() const { return !ca.empty(); }
};

inline constexpr unsigned kReloadSeconds = 2;

}  // namespace weightwire::tls
