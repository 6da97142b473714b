#include "bench/transport/ways.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <iostream>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

#include "bench/transport/serve.h"

extern char** environ;

namespace weightwire::bench {
namespace {

using namespace std::chrono_literals;  // NOLINT: a program
using transport::Endpoint;
using transport::RegionKey;

constexpr size_t kPosted = 16;

class Server {
 public:
  Server(std::string way, uint64_t bytes) {
    std::string self = "/proc/self/exe";
    std::string serve = "serve";
    std::string count = std::to_string(bytes);
    char* argv[] = {self.data(), serve.data(), way.data(), count.data(), nullptr};
    int in[2];
    int out[2];
    WW_CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    WW_CHECK(posix_spawn(&pid_, self.c_str(), &actions, nullptr, argv, environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    stdin_ = in[1];
    std::string line;
    for (char byte; read(out[0], &byte, 1) == 1 && byte != '\n';) line.push_back(byte);
    close(out[0]);
    words_ = std::istringstream(line);
  }
  ~Server() {
    close(stdin_);  // ends it
    waitpid(pid_, nullptr, 0);
  }
  template <typename... Word>
  void Tells(Word&... words) {
    if ((words_ >> ... >> words)) return;
    std::cerr << "the serving process told nothing: see above" << std::endl;
    std::exit(1);
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int stdin_ = -1;
  std::istringstream words_;
};

class Memcpy final : public Way {
 public:
  explicit Memcpy(std::span<std::byte> into) : into_(into), from_(MakeSource(into.size())) {}
  void Run() override { std::memcpy(into_.data(), from_->data(), into_.size()); }

 private:
  const std::span<std::byte> into_;
  const std::shared_ptr<memory::MemoryRegion> from_;
};

class RawSockets final : public Way {
 public:
  RawSockets(const std::string& way, std::span<std::byte> into)
      : into_(into), server_(way, into.size()), sockets_(std::stoul(way.substr(4))) {
    uint16_t port = 0;
    server_.Tells(port);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(port);
    for (int& fd : sockets_) {
      fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      WW_CHECK(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    }
  }
  ~RawSockets() override {
    for (int fd : sockets_) close(fd);
  }
  void Run() override {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < sockets_.size(); ++i) {
      const uint64_t begin = into_.size() * i / sockets_.size();
      const uint64_t end = into_.size() * (i + 1) / sockets_.size();
      threads.emplace_back(
          [this, i, begin, end] { Read(sockets_[i], begin, into_.subspan(begin, end - begin)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  pid_t server() const override { return server_.pid(); }

 private:
  static void Read(int fd, uint64_t offset, std::span<std::byte> target) {
    const uint64_t range[2] = {offset, target.size()};
    WW_CHECK(send(fd, range, sizeof(range), 0) == sizeof(range));
    while (!target.empty()) {
      const ssize_t some = recv(fd, target.data(), std::min(kCallBytes, target.size()), 0);
      WW_CHECK(some > 0);
      target = target.subspan(static_cast<size_t>(some));
    }
  }
  const std::span<std::byte> into_;
  Server server_;
  std::vector<int> sockets_;
};

class OverTransport final : public Way {
 public:
  OverTransport(const std::string& way, std::span<std::byte> into)
      : into_(into), server_(way, into.size()), transport_(MakeBackend(way)) {
    std::string address;
    server_.Tells(address, key_.id, key_.generation);
    WW_CHECK(transport_->Start(&handler_, Incarnation(2)).ok());
    transport::Hello hello;
    hello.caller = Incarnation(2);
    hello.callee = Incarnation(1);
    std::promise<std::shared_ptr<Endpoint>> opened;
    transport_->Connect(address, hello, 30s, [&](Result<std::shared_ptr<Endpoint>> endpoint) {
      if (!endpoint.has_value()) std::cerr << endpoint.error().ToString() << std::endl;
      WW_CHECK(endpoint.has_value());
      opened.set_value(*endpoint);
    });
    endpoint_ = opened.get_future().get();
  }
  void Run() override {
    next_ = 0;
    left_ = (into_.size() + kCallBytes - 1) / kCallBytes;
    std::promise<void> done;
    done_ = &done;
    for (size_t i = 0; i < kPosted; ++i) PostNext();
    done.get_future().wait();
  }
  pid_t server() const override { return server_.pid(); }

 private:
  void PostNext() {
    const uint64_t offset = next_.fetch_add(1) * kCallBytes;
    if (offset >= into_.size()) return;
    const uint64_t bytes = std::min<uint64_t>(kCallBytes, into_.size() - offset);
    endpoint_->Get(key_, offset, {into_.subspan(offset, bytes)}, 60s, nullptr,
                   [this](Status status) {
                     WW_CHECK(status.ok());
                     PostNext();
                     if (left_.fetch_sub(1) == 1) done_->set_value();
                   });
  }

  const std::span<std::byte> into_;
  Server server_;
  AcceptAll handler_;
  RegionKey key_;
  std::unique_ptr<transport::Transport> transport_;
  std::shared_ptr<Endpoint> endpoint_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_{0};
  std::promise<void>* done_ = nullptr;
};

}  // namespace

std::unique_ptr<Way> MakeWay(const std::string& way, std::span<std::byte> target) {
  if (way == "memcpy") return std::make_unique<Memcpy>(target);
  if (way.starts_with("raw-")) return std::make_unique<RawSockets>(way, target);
  return std::make_unique<OverTransport>(way, target);
}

}  // namespace weightwire::bench
