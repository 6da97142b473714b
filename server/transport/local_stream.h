#pragma once

#include <boost/asio/local/stream_protocol.hpp>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "server/memory/fd_passing.h"
#include "server/memory/region.h"

namespace weightwire::transport {

/// A Unix socket that carries bytes in order, with file descriptors among them. Everything runs on
/// the thread of the socket's context.
class LocalStream final : public std::enable_shared_from_this<LocalStream> {
 public:
  using Socket = boost::asio::local::stream_protocol::socket;
  struct Handlers {
    /// Gets all unread bytes, returns how many it took; 0 to wait for more. May call anything here.
    std::function<Result<size_t>(std::span<const std::byte> unread)> consume;
    /// The peer has gone, or broke the rules; `cause` is a metric label. Not after Close.
    std::function<void(Status why, const char* cause)> ended;
  };

  explicit LocalStream(Socket socket);

  /// OK when the peer runs under our effective uid. kPermissionDenied otherwise.
  Status CheckPeer();
  /// Starts to read, or changes who reads. The handlers are kept until Close.
  void Read(Handlers handlers);
  /// Queues `bytes`, with the descriptor of `region` if there is one. `sent` runs when they are in
  /// the kernel.
  void Send(std::vector<std::byte> bytes, std::shared_ptr<memory::MemoryRegion> region = nullptr,
            std::function<void()> sent = nullptr);
  /// The oldest descriptor received and not taken; invalid when there is none.
  memory::UniqueFd TakeFd();
  /// False once the peer's end was closed, even when bytes of it are still unread.
  bool PeerIsThere();
  void Close();

 private:
  struct Outgoing {
    std::vector<std::byte> bytes;
    size_t sent_bytes = 0;
    std::shared_ptr<memory::MemoryRegion> region;
    std::function<void()> sent;
  };

  void WaitToRead();
  void OnReadable();
  void Dispatch();
  void WriteMore();
  void End(Status why, const char* cause);

  Socket socket_;
  std::shared_ptr<Handlers> handlers_;  ///< null before Read and after Close
  bool reading_ = false;
  bool write_waits_ = false;
  bool closed_ = false;
  std::vector<std::byte> chunk_;
  std::vector<std::byte> unread_;
  std::deque<memory::UniqueFd> fds_;
  std::deque<Outgoing> queue_;
  size_t queued_bytes_ = 0;
};

}  // namespace weightwire::transport
