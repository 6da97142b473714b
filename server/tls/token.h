#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/status.h"
#include "server/tls/identity.h"
#include "server/tls/watched_file.h"

/// Job tokens: what a process that has no certificate of its own shows with every call, over TLS
/// only. One line of text,
///
///   ww1;<identity's URI>;<expires>;<id>;<mac>
///
/// with the end in seconds since the Unix epoch, 16 random bytes and an HMAC-SHA256 of all that
/// precedes it, both in hex. Who has the key can make tokens; who has a token is who it names.
namespace weightwire::tls {

/// Of a call's metadata.
inline constexpr char kTokenMetadata[] = "weightwire-token";

struct Token {
  Identity identity;
  int64_t expires_s = 0;  ///< good before, since the Unix epoch
  std::string id;         ///< of this very token, in hex
};

/// What a token claims. kUnauthenticated / kPermissionDenied: it has not the form.
Result<Token> ParseToken(std::string_view text);

/// The token in a file, which may change; whitespace around it is ignored. Thread-safe.
class TokenFile {
 public:
  explicit TokenFile(std::string path) : file_(std::move(path)) {}
  /// As it is now. kInvalidArgument / kConfigInvalid: not readable.
  Result<std::string> Text();

 private:
  WatchedFile file_;
};

/// The keys of a file, one in each line of at least kTokenKeyBytesMin characters: the first signs,
/// all of them check. So a key is changed in two steps: a new line on top, and later the old one
/// away. The file may change. Thread-safe.
inline constexpr size_t kTokenKeyBytesMin = 32;
class TokenKeys {
 public:
  explicit TokenKeys(std::string path) : file_(std::move(path)) {}

  /// kInvalidArgument / kConfigInvalid: not readable, no key, or a short one.
  Status Check();
  /// A new token. Errors: Check's.
  Result<std::string> Mint(const Identity& identity, int64_t expires_s);
  /// Whose token this is.
  ///   kUnauthenticated / kPermissionDenied  no token, of none of the keys, or expired at `now_s`
  Result<Token> Verify(std::string_view text, int64_t now_s);

 private:
  Result<std::vector<std::string>> Keys();

  WatchedFile file_;
};

/// Seconds since the Unix epoch.
int64_t WallSecondsNow();
/// What an expired token's owner hears.
Status TokenExpired(const Token& token);

}  // namespace weightwire::tls
