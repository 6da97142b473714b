#pragma once

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "server/memory/fd_passing.h"
#include "server/transport/address.h"
#include "server/transport/frame.h"

/// Bytes on plain sockets, for peers that do not keep to the protocol.
namespace weightwire::conformance {

using memory::UniqueFd;
using transport::Frame;
using transport::FrameType;
using transport::kFrameBytes;

struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;
  int family = AF_INET;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

/// Facts that cuda_ipc adds to an address are none of the socket's.
inline Address AddressOf(const std::string& address_text) {
  const std::string text = address_text.substr(0, address_text.find('?'));
  Address address;
  if (text.front() == '@') {
    auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
    local->sun_family = AF_UNIX;
    std::memcpy(local->sun_path + 1, text.data() + 1, text.size() - 1);
    address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
    address.family = AF_UNIX;
  } else {
    auto* inet = reinterpret_cast<sockaddr_in*>(&address.storage);
    inet->sin_family = AF_INET;
    inet->sin_port = htons(transport::SplitAddress(text)->second);
    inet->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.size = sizeof(sockaddr_in);
  }
  return address;
}

/// A plain blocking socket.
class Plain {
 public:
  explicit Plain(UniqueFd fd) : fd_(std::move(fd)) {}
  /// `from`: the address that a tcp socket is bound to before.
  static Plain ConnectTo(const std::string& text, in_addr_t from = INADDR_ANY) {
    const Address address = AddressOf(text);
    UniqueFd fd(socket(address.family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (from != INADDR_ANY) {
      const sockaddr_in bound{
          .sin_family = AF_INET, .sin_port = 0, .sin_addr = {htonl(from)}, .sin_zero = {}};
      EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&bound), sizeof(bound)), 0);
    }
    EXPECT_EQ(connect(fd.get(), address.get(), address.size), 0) << std::strerror(errno);
    return Plain(std::move(fd));
  }
  /// Bytes that the peer no longer takes are its right.
  void Send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      bytes = bytes.subspan(static_cast<size_t>(sent));
    }
  }
  void Send(const Frame& frame) {
    std::array<std::byte, kFrameBytes> bytes;
    EncodeFrame(frame, bytes);
    Send(bytes);
  }
  /// False when the peer has closed.
  bool TrySend(const Frame& frame, std::span<const std::byte> payload, int fd) {
    std::vector<std::byte> bytes(kFrameBytes);
    EncodeFrame(frame, std::span(bytes).first<kFrameBytes>());
    bytes.insert(bytes.end(), payload.begin(), payload.end());
    return memory::SendWithFds(fd_.get(), bytes, std::span(&fd, 1)).ok();
  }
  /// False when the peer closed before all had come.
  bool Receive(std::span<std::byte> into) {
    while (!into.empty()) {
      const ssize_t got = recv(fd_.get(), into.data(), into.size(), 0);
      if (got <= 0) return false;
      into = into.subspan(static_cast<size_t>(got));
    }
    return true;
  }
  /// Both directions; who reads or writes on another thread hears of it.
  void End() { shutdown(fd_.get(), SHUT_RDWR); }
  /// Reads until the peer closes; false when it does not within the deadline of a failure.
  bool SeesEnd() {
    std::array<std::byte, 4096> ignored;
    for (;;) {
      pollfd poll_fd{fd_.get(), POLLIN, 0};
      if (poll(&poll_fd, 1, 30'000) <= 0) return false;
      if (recv(fd_.get(), ignored.data(), ignored.size(), 0) <= 0) return true;
    }
  }

 private:
  UniqueFd fd_;
};

/// A listener that is no weightwire.
class RawListener {
 public:
  explicit RawListener(bool is_tcp)
      : fd_(socket(is_tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    text_ = is_tcp ? "127.0.0.1:0" : "@ww-raw-" + std::to_string(getpid());
    Address address = AddressOf(text_);
    EXPECT_EQ(bind(fd_.get(), address.get(), address.size), 0);
    EXPECT_EQ(listen(fd_.get(), 8), 0);
    if (is_tcp) {
      sockaddr_in bound{};
      socklen_t size = sizeof(bound);
      EXPECT_EQ(getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&bound), &size), 0);
      text_ = "127.0.0.1:" + std::to_string(ntohs(bound.sin_port));
    }
  }
  const std::string& address() const { return text_; }
  Plain Accept() { return Plain(UniqueFd(accept(fd_.get(), nullptr, nullptr))); }

 private:
  UniqueFd fd_;
  std::string text_;
};

}  // namespace weightwire::conformance
