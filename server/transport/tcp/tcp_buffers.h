#pragma once

#include <boost/asio/buffer.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <span>

/// What Asio is given to read and write large payloads with.
namespace weightwire::transport {

/// Bytes asked of the kernel at once; Asio's own limit is 64 KiB. bench/transport on loopback: at
/// 256 KiB four connections cost 1.19 × the CPU time of plain sockets, at 4 MiB 1.04 ×.
inline constexpr size_t kBytesPerCall = 4 << 20;

/// Bytes of a payload that are read at once, into a buffer from which they are brought to where
/// they belong: two of them fit a second-level cache of 512 KiB. The kernel writes there faster
/// than to memory that nobody has touched for long, and what is brought on from there is stored
/// past the caches (docs/history/performance.md).
inline constexpr size_t kPieceBytes = 256 << 10;
/// Read before others on the loop have their turn.
inline constexpr int kPiecesAtOnce = 16;

struct LargeCalls {
  size_t operator()(const boost::system::error_code& error, size_t) const {
    return error ? 0 : kBytesPerCall;
  }
};

/// A buffer sequence that is cheap to copy. Points into the connection, which the handler keeps.
struct BufferView {
  using value_type = boost::asio::const_buffer;
  using const_iterator = const value_type*;
  std::span<const value_type> buffers;
  const_iterator begin() const { return buffers.data(); }
  const_iterator end() const { return buffers.data() + buffers.size(); }
};

}  // namespace weightwire::transport
