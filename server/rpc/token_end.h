#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "server/rpc/runtime.h"
#include "server/rpc/stream_set.h"

namespace weightwire::rpc {

/// The job token that a stream was opened with: good for as long as the authorizer would take it,
/// that is until it expires or the key that signed it is in `token_key` no more. Without one (a
/// certificate, or no TLS) a stream is always good. Belongs to its stream; strand only.
class StreamToken {
 public:
  /// `text`: as the call showed it; nullopt: none.
  StreamToken(const Runtime& runtime, std::optional<std::string> text)
      : runtime_(runtime), text_(std::move(text)) {}

  /// What a call that shows the token now would hear: kUnauthenticated / kPermissionDenied.
  Status Check() const;

  /// Ends `stream`, the one that it belongs to, with what Check says: when the token expires, and
  /// at most 2 s after its key is gone or the wall clock was set beyond its end. The stream is held
  /// weakly, and the timer that looks for it outlives it by 2 s at most.
  void EndInTime(std::weak_ptr<EndableStream> stream) const;

 private:
  /// Only with a token.
  Result<double> SecondsLeft() const;

  const Runtime& runtime_;
  const std::optional<std::string> text_;
};

}  // namespace weightwire::rpc
