#include "server/rpc/acceptor.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

namespace weightwire::rpc {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr int kBacklog = 1'024;

int DescriptorsMax() {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  return static_cast<int>(std::min<rlim_t>(limit.rlim_cur, 1 << 30));
}

memory::UniqueFd OpenSpare() { return memory::UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)); }

std::optional<uid_t> PeerUid(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

std::string_view ErrnoLabel(int error) {
  switch (error) {
    case EMFILE:
      return "emfile";
    case ENFILE:
      return "enfile";
    case ENOBUFS:
    case ENOMEM:
      return "memory";
    case ECONNABORTED:
      return "econnaborted";
    default:
      return "other";
  }
}

Status ListenFailed(const std::string& address, const std::string& cause) {
  return Status(Code::kUnavailable, Reason::kIoError, "cannot listen on " + address + ": " + cause)
      .Remedy("choose another address, or stop what uses it");
}

/// `Protocol` is asio's ip::tcp or local::stream_protocol.
template <typename Protocol>
class AcceptorImpl final : public Acceptor {
 public:
  AcceptorImpl(asio::io_context& io, typename Protocol::acceptor acceptor, std::string address,
               std::string path, metrics::Sink& metrics, Accepted accepted, int percent,
               std::vector<uint32_t> uids = {}, Refused refused = nullptr)
      : acceptor_(std::move(acceptor)),
        retry_(io),
        address_(std::move(address)),
        path_(std::move(path)),
        metrics_(metrics),
        accepted_(std::move(accepted)),
        uids_(std::move(uids)),
        refused_(std::move(refused)),
        spare_(OpenSpare()),
        descriptors_max_(static_cast<int>(int64_t{DescriptorsMax()} * percent / 100)) {
    Wait();
  }
  ~AcceptorImpl() override { Close(); }

  std::string address() const override { return address_; }

  void Close() override {
    error_code ignored;
    retry_.cancel();
    if (!acceptor_.is_open()) return;
    acceptor_.close(ignored);
    if (!path_.empty()) unlink(path_.c_str());
  }

 private:
  void Wait() {
    acceptor_.async_accept([this](error_code error, typename Protocol::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) return Failed(error.value());
      Take(std::move(socket));
      Wait();
    });
  }

  void Take(typename Protocol::socket socket) {
    error_code error;
    memory::UniqueFd fd(socket.release(error));
    if (error) return;
    if (fd.get() >= descriptors_max_) {
      metrics_.Add("connections_shed_total", 1);
      return;
    }
    if (!path_.empty() && !Admit(fd.get())) return;
    Prepare(fd.get());
    accepted_(std::move(fd));
  }

  /// Whoever has the same user, or one that is named.
  bool Admit(int socket) {
    const auto uid = PeerUid(socket);
    if (uid && (*uid == geteuid() || std::ranges::find(uids_, *uid) != uids_.end())) return true;
    metrics_.Add("auth_failures_total", 1, {{"reason", "uid"}});
    if (uid && refused_) refused_(*uid);
    return false;
  }

  static void Prepare(int fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    if constexpr (std::is_same_v<Protocol, asio::ip::tcp>) {
      const int on = 1;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
  }

  void Failed(int error) {
    metrics_.Add("accept_errors_total", 1, {{"errno", std::string(ErrnoLabel(error))}});
    if ((error == EMFILE || error == ENFILE) && spare_.valid()) {
      spare_ = {};
      // Blocks never: asio set the listener non-blocking.
      memory::UniqueFd shed(accept4(acceptor_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC));
      const bool progress = shed.valid();
      shed = {};
      spare_ = OpenSpare();
      if (progress) return Wait();
    }
    // Without a pause a lasting error would spin.
    if (!spare_.valid()) spare_ = OpenSpare();
    retry_.expires_after(std::chrono::milliseconds(100));
    retry_.async_wait([this](error_code aborted) {
      if (!aborted) Wait();
    });
  }

  typename Protocol::acceptor acceptor_;
  asio::steady_timer retry_;
  const std::string address_;
  const std::string path_;  ///< of a Unix socket
  metrics::Sink& metrics_;
  const Accepted accepted_;
  const std::vector<uint32_t> uids_;  ///< whom a Unix socket lets in besides the own user
  const Refused refused_;             ///< may be null
  memory::UniqueFd spare_;
  const int descriptors_max_;  ///< no connection has one from here on
};

/// Whether a live process accepts on `path`.
bool Answers(asio::io_context& io, const std::string& path) {
  asio::local::stream_protocol::socket probe(io);
  error_code error;
  probe.connect(asio::local::stream_protocol::endpoint(path), error);
  return !error;
}

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::ListenTcp(asio::io_context& io,
                                                      const std::string& address,
                                                      metrics::Sink& metrics, Accepted accepted,
                                                      int percent) {
  using asio::ip::tcp;
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) return Fail(ListenFailed(address, "not host:port"));
  std::string host = address.substr(0, colon);
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  error_code error;
  tcp::resolver resolver(io);
  const auto found =
      resolver.resolve(host, address.substr(colon + 1), tcp::resolver::passive, error);
  if (error) return Fail(ListenFailed(address, error.message()));
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor acceptor(io);
  acceptor.open(endpoint.protocol(), error);
  if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
  if (!error) acceptor.bind(endpoint, error);
  if (!error) acceptor.listen(kBacklog, error);
  if (error) return Fail(ListenFailed(address, error.message()));
  const tcp::endpoint bound = acceptor.local_endpoint();
  const std::string text = bound.address().is_v6() ? "[" + bound.address().to_string() + "]"
                                                   : bound.address().to_string();
  return std::make_unique<AcceptorImpl<tcp>>(io, std::move(acceptor),
                                             text + ":" + std::to_string(bound.port()), "", metrics,
                                             std::move(accepted), percent);
}

Result<std::unique_ptr<Acceptor>> Acceptor::ListenUnix(asio::io_context& io,
                                                       const std::string& path,
                                                       metrics::Sink& metrics,
                                                       const UnixAccess& access, Accepted accepted,
                                                       Refused refused) {
  using Local = asio::local::stream_protocol;
  if (path.empty() || path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Fail(ListenFailed("unix:" + path, "the path must have 1 to 107 bytes"));
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return Fail(ListenFailed("unix:" + path, "the path exists and is no socket"));
    }
    if (Answers(io, path)) {
      return Fail(
          Status(Code::kAlreadyExists, Reason::kIoError, "another process listens on unix:" + path)
              .Remedy("stop it, or choose another agent_socket"));
    }
    unlink(path.c_str());
  }
  error_code error;
  Local::acceptor acceptor(io);
  acceptor.open(Local(), error);
  if (!error) acceptor.bind(Local::endpoint(path), error);
  auto failed = [&](int result) {
    if (result != 0) error.assign(errno, boost::system::system_category());
    return result != 0;
  };
  // Closed to all others first: what it opens to is decided by mode and group together.
  if (!error && !failed(chmod(path.c_str(), 0600)) && !access.uids.empty()) {
    const auto unchanged = static_cast<uid_t>(-1);
    if (!access.group || !failed(chown(path.c_str(), unchanged, *access.group))) {
      failed(chmod(path.c_str(), access.group ? 0660 : 0666));
    }
  }
  if (!error) acceptor.listen(kBacklog, error);
  if (error) return Fail(ListenFailed("unix:" + path, error.message()));
  return std::make_unique<AcceptorImpl<Local>>(io, std::move(acceptor), "unix:" + path, path,
                                               metrics, std::move(accepted), kSharedPercent,
                                               access.uids, std::move(refused));
}

}  // namespace weightwire::rpc
