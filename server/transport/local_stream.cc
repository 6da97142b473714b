// The socket never blocks the loop: what the kernel does not take at once waits in the queue. It is
// read without limit, since what a peer can make us queue in turn is bounded by the protocol above
// and by kQueuedBytesMax.
#include "server/transport/local_stream.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "server/transport/operation.h"

namespace weightwire::transport {
namespace {

using boost::system::error_code;

constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kQueuedBytesMax = 256 << 20;

}  // namespace

LocalStream::LocalStream(Socket socket) : socket_(std::move(socket)), chunk_(kReadBytes) {
  error_code ignored;  // a broken socket fails at its first use
  socket_.non_blocking(true, ignored);
}

Status LocalStream::CheckPeer() {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket_.native_handle(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return TransportFailed("the peer's uid cannot be told");
  }
  if (peer.uid == geteuid()) return OkStatus();
  return Status(Code::kPermissionDenied, Reason::kPermissionDenied,
                "shared memory needs one user: the peer runs as uid " + std::to_string(peer.uid) +
                    ", this side as " + std::to_string(geteuid()));
}

void LocalStream::Read(Handlers handlers) {
  handlers_ = std::make_shared<Handlers>(std::move(handlers));
  if (std::exchange(reading_, true)) return;
  WaitToRead();
}

void LocalStream::WaitToRead() {
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const error_code& error) {
    if (self->closed_) return;
    if (error) return self->End(TransportFailed("the connection broke"), "broken");
    self->OnReadable();
  });
}

void LocalStream::OnReadable() {
  auto received = memory::ReceiveWithFds(socket_.native_handle(), chunk_);
  if (!received.has_value()) {
    const bool garbage = received.error().code() == Code::kInvalidArgument;
    return End(TransportFailed(received.error().message()), garbage ? "garbage" : "broken");
  }
  if (received->would_block) return WaitToRead();
  if (received->bytes == 0)
    return End(TransportFailed("the peer closed the session"), "peer_closed");
  for (memory::UniqueFd& fd : received->fds) fds_.push_back(std::move(fd));
  if (fds_.size() > memory::kFdsPerMessageMax) {
    return End(TransportFailed("the peer sent garbage: descriptors for nothing"), "garbage");
  }
  unread_.insert(unread_.end(), chunk_.begin(),
                 chunk_.begin() + static_cast<std::ptrdiff_t>(received->bytes));
  Dispatch();
  if (!closed_) WaitToRead();
}

void LocalStream::Dispatch() {
  size_t taken = 0;
  while (!closed_ && taken < unread_.size()) {
    const std::shared_ptr<Handlers> handlers = handlers_;  // outlives a Close inside consume
    auto consumed = handlers->consume(std::span(unread_).subspan(taken));
    if (!consumed.has_value()) {
      return End(TransportFailed("the peer sent garbage: " + consumed.error().message()),
                 "garbage");
    }
    if (*consumed == 0) break;
    taken += *consumed;
  }
  unread_.erase(unread_.begin(), unread_.begin() + static_cast<std::ptrdiff_t>(taken));
}

void LocalStream::Send(std::vector<std::byte> bytes, std::shared_ptr<memory::MemoryRegion> region,
                       std::function<void()> sent) {
  if (closed_) return;
  queued_bytes_ += bytes.size();
  queue_.push_back({std::move(bytes), 0, std::move(region), std::move(sent)});
  if (!write_waits_) WriteMore();
}

void LocalStream::WriteMore() {
  while (!queue_.empty()) {
    Outgoing& first = queue_.front();
    const int fd = first.region != nullptr ? first.region->fd() : -1;
    const std::span<const int> fds(&fd, first.region != nullptr ? 1 : 0);
    auto sent = memory::SendSomeWithFds(socket_.native_handle(),
                                        std::span(first.bytes).subspan(first.sent_bytes), fds);
    // A broken socket is noticed by the reader, which is always there.
    if (!sent.has_value()) return;
    if (*sent == 0) break;
    first.region.reset();
    first.sent_bytes += *sent;
    queued_bytes_ -= *sent;
    if (first.sent_bytes < first.bytes.size()) continue;
    const auto done = std::move(first.sent);
    queue_.pop_front();
    if (done) done();
  }
  if (queue_.empty()) return;
  if (queued_bytes_ > kQueuedBytesMax) {
    // Not from inside whoever sends.
    return static_cast<void>(shutdown(socket_.native_handle(), SHUT_RDWR));
  }
  write_waits_ = true;
  socket_.async_wait(Socket::wait_write, [self = shared_from_this()](const error_code& error) {
    self->write_waits_ = false;
    if (!self->closed_ && !error) self->WriteMore();
  });
}

memory::UniqueFd LocalStream::TakeFd() {
  if (fds_.empty()) return {};
  memory::UniqueFd fd = std::move(fds_.front());
  fds_.pop_front();
  return fd;
}

bool LocalStream::PeerIsThere() {
  pollfd poll_fd{socket_.native_handle(), POLLRDHUP, 0};
  return poll(&poll_fd, 1, 0) == 0;
}

void LocalStream::End(Status why, const char* cause) {
  if (closed_) return;
  const std::shared_ptr<Handlers> handlers = handlers_;
  handlers->ended(std::move(why), cause);
}

void LocalStream::Close() {
  if (std::exchange(closed_, true)) return;
  error_code ignored;
  socket_.shutdown(Socket::shutdown_both, ignored);
  socket_.close(ignored);
  handlers_ = nullptr;
  queue_.clear();
  fds_.clear();
}

}  // namespace weightwire::transport
