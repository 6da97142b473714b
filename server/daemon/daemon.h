#pragma once

#include <memory>
#include <string>

#include "server/base/status.h"
#include "server/daemon/config.h"

namespace weightwire::daemon {

/// What the program is built from; in weightwire_build_info.
struct Build {
  std::string version, revision;
};

/// One weightwired: its roles, listeners and HTTP pages. Everything is called on one thread.
class Daemon {
 public:
  /// Binds every listener and, where there is an agent, waits up to 5 s for its session. With etcd
  /// it serves HTTP and waits until it leads; nullptr: SIGTERM or SIGINT came before that.
  static Result<std::unique_ptr<Daemon>> Start(const Config& config, const Build& build);
  virtual ~Daemon() = default;

  /// "weightwired ready role=all grpc=… http=… agent=unix:…"
  virtual std::string ReadyLine() const = 0;
  /// Serves until SIGTERM or SIGINT. From then on a second signal ends the process at once.
  virtual void Run() = 0;
  /// Answers everything that waits and closes, within 5 s.
  virtual void Stop() = 0;
};

}  // namespace weightwire::daemon
