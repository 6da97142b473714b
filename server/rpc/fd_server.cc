#include "server/rpc/fd_server.h"

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "server/base/failpoint.h"
#include "server/memory/fd_passing.h"
#include "server/wire/checks.h"
#include "server/wire/fd_protocol.h"

namespace weightwire::rpc {
namespace {

namespace asio = boost::asio;
using asio::local::stream_protocol;
using boost::system::error_code;

constexpr size_t kConnectionsMax = 256;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::io_context& io, FdTable& table, memory::UniqueFd fd, uint64_t nth,
             std::function<void()> closed)
      : peer_(std::make_shared<const PeerProcess>(fd.get(), nth)),
        socket_(io, stream_protocol(), fd.Release()),
        table_(table),
        closed_(std::move(closed)) {
    error_code ignored;
    socket_.native_non_blocking(true, ignored);
  }

  uint64_t process() const { return peer_->key(); }

  void Wait() {
    socket_.async_wait(stream_protocol::socket::wait_read,
                       [self = shared_from_this()](error_code error) {
                         if (!error && self->Read()) return self->Wait();
                         self->Close();
                       });
  }

  void Close() {
    error_code ignored;
    socket_.close(ignored);
    if (auto closed = std::exchange(closed_, nullptr)) closed();
  }

 private:
  /// False when the connection is over.
  bool Read() {
    auto got = memory::ReceiveWithFds(socket_.native_handle(), std::span(frame_).subspan(filled_));
    if (!got) return false;
    if (got->would_block) return true;
    if (got->bytes == 0) return false;
    filled_ += got->bytes;
    for (memory::UniqueFd& fd : got->fds) fds_.push_back(std::move(fd));
    if (fds_.size() > 1) return Refuse(wire::Bad("fd frame", "carries more than one fd"));
    if (filled_ < frame_.size()) return true;
    filled_ = 0;
    return Answer(std::exchange(fds_, {}));
  }

  bool Answer(std::vector<memory::UniqueFd> fds) {
    auto request = wire::DecodeFdRequest(frame_);
    if (!request) return Refuse(request.error());
    if (fds.empty() == (request->op == wire::FdOp::kPut)) {
      return Refuse(wire::Bad("fd frame", "a put carries one fd, a get none"));
    }
    return request->op == wire::FdOp::kPut ? Put(std::move(fds[0])) : Get(request->token);
  }

  bool Put(memory::UniqueFd fd) {
    auto token = table_.Put(std::move(fd), peer_);
    WW_FAILPOINT("rpc.after_an_fd_is_taken_before_its_token");
    return token ? Send({Reason::kNone, *token}, -1) : Send({token.error().reason(), 0}, -1);
  }

  bool Get(uint64_t token) {
    auto fd = table_.Redeem(token);
    WW_FAILPOINT("rpc.before_an_fd_is_given");
    return fd ? Send({Reason::kNone, token}, fd->get()) : Send({fd.error().reason(), token}, -1);
  }

  bool Refuse(const Status& why) {
    Send({why.reason(), 0}, -1);
    return false;
  }

  /// A peer that does not read its 16-byte answers is dropped.
  bool Send(const wire::FdReply& reply, int fd) {
    const wire::FdFrame frame = wire::Encode(reply);
    const std::array<int, 1> fds = {fd};
    const auto sent = memory::SendSomeWithFds(socket_.native_handle(), frame,
                                              std::span(fds).first(fd < 0 ? 0 : 1));
    return sent.has_value() && *sent == frame.size();
  }

  const std::shared_ptr<const PeerProcess> peer_;
  stream_protocol::socket socket_;
  FdTable& table_;
  std::function<void()> closed_;
  wire::FdFrame frame_{};
  size_t filled_ = 0;
  std::vector<memory::UniqueFd> fds_;
};

class FdServerImpl final : public FdServer {
 public:
  FdServerImpl(asio::io_context& io, FdTable& table) : io_(io), table_(table) {}
  ~FdServerImpl() override { CloseAll(); }

  void Serve(memory::UniqueFd fd) override {
    if (connections_.size() >= kConnectionsMax) MakeRoom();
    const uint64_t id = ++next_;
    auto connection = std::make_shared<Connection>(io_, table_, std::move(fd), id,
                                                   [this, id] { connections_.erase(id); });
    connections_.emplace(id, connection);
    connection->Wait();
  }

  void CloseAll() override {
    const auto connections = connections_;
    for (const auto& [id, connection] : connections) connection->Close();
  }

 private:
  void MakeRoom() {
    std::map<uint64_t, size_t> of_process;
    size_t most = 0;
    for (const auto& [id, connection] : connections_) {
      most = std::max(most, ++of_process[connection->process()]);
    }
    const auto oldest = std::ranges::find_if(connections_, [&](const auto& entry) {
      return of_process[entry.second->process()] == most;
    });
    const std::shared_ptr<Connection> leaves = oldest->second;  // closing it takes it out
    leaves->Close();
  }

  asio::io_context& io_;
  FdTable& table_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::shared_ptr<Connection>> connections_;
};

}  // namespace

std::unique_ptr<FdServer> FdServer::Make(asio::io_context& io, FdTable& table) {
  return std::make_unique<FdServerImpl>(io, table);
}

}  // namespace weightwire::rpc
