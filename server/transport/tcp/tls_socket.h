#pragma once

#include <boost/system/error_code.hpp>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "server/base/status.h"
#include "server/transport/tcp/tls_peers.h"

struct ssl_st;

namespace weightwire::transport {

/// What a step waits for before it is tried again.
enum class TlsNeeds { kNothing, kReadable, kWritable };

/// TLS 1.3 over one non-blocking socket, on which the caller waits and which it closes: nothing is
/// called after that but the destructor. OpenSSL reads and writes the socket itself, so that the
/// kernel does TLS where it can. On one thread at a time. A failure stays.
class TlsSocket {
 public:
  enum class Side { kCaller, kCallee };
  /// Most bytes that are staged at once.
  static constexpr size_t kStageBytes = 256 << 10;

  TlsSocket(ssl_ctx_st* context, Side side, int fd);
  ~TlsSocket();

  /// Whether a Read or a Flush ended with `error` for what came in is not what the peer sent.
  static bool IsForgery(const boost::system::error_code& error);

  // Steps. kNothing: done, or failed as `*error` says.
  TlsNeeds Handshake(boost::system::error_code* error);
  /// At least one byte, unless `into` is empty.
  TlsNeeds Read(std::span<std::byte> into, size_t* got, boost::system::error_code* error);
  /// Sends what was staged, to its end.
  TlsNeeds Flush(boost::system::error_code* error);

  /// Takes a copy of as much of `bytes` as there is room for; all that was staged before has been
  /// flushed, or came in the same breath.
  size_t Stage(std::span<const std::byte> bytes);

  /// What `peers` says of who shook hands.
  Status CheckPeer(TlsPeers& peers) const;

 private:
  TlsNeeds Explain(int result, boost::system::error_code* error);

  const std::unique_ptr<ssl_st, void (*)(ssl_st*)> ssl_;
  boost::system::error_code failed_;
  std::vector<std::byte> stage_;
  size_t flushed_ = 0;  ///< of stage_
};

}  // namespace weightwire::transport
