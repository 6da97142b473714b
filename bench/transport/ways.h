#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace weightwire::bench {

/// One way of filling a target with the pattern; made once, run many times.
class Way {
 public:
  virtual ~Way() = default;
  virtual void Run() = 0;
  /// The process that holds the bytes; 0: this one.
  virtual pid_t server() const { return 0; }
};

/// "memcpy" (one thread), "raw-N" (N loopback sockets, a thread each side and socket), or what
/// MakeBackend knows: Gets of kCallBytes, 16 of them posted at a time.
std::unique_ptr<Way> MakeWay(const std::string& way, std::span<std::byte> target);

}  // namespace weightwire::bench
