#pragma once

#include <memory>
#include <string>

#include "server/base/executor.h"

namespace boost::asio {
class io_context;
}

namespace weightwire::transport {

/// One thread that waits in epoll and runs what it is told: a strand for the sockets made on its
/// context. Objects on the context must be gone or idle before Stop returns.
class IoLoop {
 public:
  /// `name`: ≤ 15 characters, for `top -H`.
  explicit IoLoop(const std::string& name);
  ~IoLoop();
  boost::asio::io_context& context();
  /// Thread-safe; in order. After Stop there is no thread left: `task` then runs inside Post.
  void Post(Task task);
  /// Runs everything that is still posted or pending, then joins. Not from the loop's own thread.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weightwire::transport
