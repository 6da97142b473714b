#pragma once

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/system/error_code.hpp>
#include <cstddef>
#include <span>

#include "server/transport/frame_mac.h"

/// What Asio is given to read and write large payloads with.
namespace weightwire::transport {

/// Bytes asked of the kernel at once; Asio's own limit is 64 KiB. bench/transport on loopback: at
/// 256 KiB four connections cost 1.19 × the CPU time of plain sockets, at 4 MiB 1.04 ×.
inline constexpr size_t kBytesPerCall = 4 << 20;

struct LargeCalls {
  size_t operator()(const boost::system::error_code& error, size_t) const {
    return error ? 0 : kBytesPerCall;
  }
};

/// A buffer sequence that is cheap to copy. Points into the connection, which the handler keeps.
template <typename Buffer>
struct BufferView {
  using value_type = Buffer;
  using const_iterator = const Buffer*;
  std::span<const Buffer> buffers;
  const Buffer* begin() const { return buffers.data(); }
  const Buffer* end() const { return buffers.data() + buffers.size(); }
};

/// Adds the bytes of a list of buffers to a MAC as they arrive, while they are in the cache.
class ArrivingUnit {
 public:
  /// The first `bytes` of `buffers` are the unit.
  ArrivingUnit(FrameMac& mac, std::span<const boost::asio::mutable_buffer> buffers, size_t bytes)
      : mac_(mac), buffers_(buffers), bytes_(bytes) {}
  /// That many bytes of the buffers have come by now.
  void Reach(size_t total) {
    for (size_t more = std::min(total, bytes_) - added_; more > 0;) {
      const auto& buffer = buffers_.front();
      const size_t some = std::min(more, buffer.size() - offset_);
      mac_.Add({static_cast<const std::byte*>(buffer.data()) + offset_, some});
      added_ += some;
      more -= some;
      offset_ += some;
      if (offset_ == buffer.size()) {
        buffers_ = buffers_.subspan(1);
        offset_ = 0;
      }
    }
  }

 private:
  FrameMac& mac_;
  std::span<const boost::asio::mutable_buffer> buffers_;
  const size_t bytes_;
  size_t added_ = 0;
  size_t offset_ = 0;  ///< in the first of buffers_
};

}  // namespace weightwire::transport
