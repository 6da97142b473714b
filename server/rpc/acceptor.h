#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/memory/region.h"
#include "server/metrics/metrics.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace weightwire::rpc {

/// Whom a Unix socket lets in besides the own user, whose uid each connection is asked for.
struct UnixAccess {
  std::vector<uint32_t> uids;     ///< empty: nobody, and the socket's mode is 0600
  std::optional<uint32_t> group;  ///< the mode is 0660 and the group this one; without: 0666
};

/// Accepts stream connections and hands them on.
///
/// When the process runs out of descriptors a spare one is given up to accept and close what waits,
/// so that callers learn of it at once and the listener lives on. Above a share of the limit of
/// descriptors new connections are closed, so that open ones keep working. Counts
/// accept_errors_total{errno} and connections_shed_total. Belongs to the io_context's thread,
/// except for construction and destruction while that does not run.
class Acceptor {
 public:
  using Accepted = std::function<void(memory::UniqueFd connection)>;
  using Refused = std::function<void(uint32_t uid)>;
  /// Percent of the limit of descriptors that connections may fill: those of probes come in where
  /// others have filled their share.
  static constexpr int kSharedPercent = 90;
  static constexpr int kHealthPercent = 95;

  /// `address` is "host:port" (port 0: any). kUnavailable / kIoError names address and cause.
  static Result<std::unique_ptr<Acceptor>> ListenTcp(boost::asio::io_context& io,
                                                     const std::string& address,
                                                     metrics::Sink& metrics, Accepted accepted,
                                                     int percent = kSharedPercent);
  /// A Unix socket that accepts the own uid and those of `access` only. What a dead process left at
  /// `path` is replaced; a socket on which somebody answers is not: kAlreadyExists / kIoError.
  /// `refused` hears of those of other users that the socket's mode let in.
  static Result<std::unique_ptr<Acceptor>> ListenUnix(boost::asio::io_context& io,
                                                      const std::string& path,
                                                      metrics::Sink& metrics,
                                                      const UnixAccess& access, Accepted accepted,
                                                      Refused refused);
  virtual ~Acceptor() = default;
  /// "127.0.0.1:41234", "[::1]:41234" or "unix:/path".
  virtual std::string address() const = 0;
  /// No further connection is accepted; removes a Unix socket's file.
  virtual void Close() = 0;
};

}  // namespace weightwire::rpc
