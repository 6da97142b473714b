#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// What a transfer is compared with, measured in the same run.
namespace weightwire::bench {

/// Seconds of one thread's memcpy.
double MemcpySeconds(std::byte* target, const std::byte* source, uint64_t bytes);

/// Loopback TCP connections between this process and one that it forks; each side has a thread for
/// each of them.
class RawSockets {
 public:
  /// Before any other thread is made: forks the reading side.
  RawSockets(int connections, uint64_t bytes);
  ~RawSockets();
  /// Seconds until the other side has everything.
  double SendSeconds(const std::byte* source);

 private:
  const int connections_;
  const uint64_t bytes_;
  int child_ = 0;
  std::vector<int> sockets_;
};

}  // namespace weightwire::bench
