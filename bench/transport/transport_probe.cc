// Moves the same bytes between two processes by several ways and prints seconds, so that ratios
// within one run can be compared:
//
//   memcpy       one thread, in one process
//   raw4         4 loopback sockets, one blocking thread each side and socket, 4 MiB calls
//   tcp N        the tcp transport with N connections, Gets of 4 MiB, 16 posted at a time
//   shm          the shm transport, the same Gets
//
// transport_probe [MB [ROUNDS]]        988 MB, 5 rounds; best, median, and mean CPU time of both
// sides transport_probe serve BACKEND BYTES  (started by itself)
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <future>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "server/memory/region.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"

extern char** environ;

namespace weightwire::transport {
namespace {

using namespace std::chrono_literals;  // NOLINT: a program

constexpr size_t kChunkBytes = 4 << 20;
constexpr int kRawSockets = 4;
constexpr size_t kPosted = 16;

class AcceptAll final : public Handler {
 public:
  Status OnHello(const Hello&) override { return OkStatus(); }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}
};

std::unique_ptr<Transport> MakeBackend(const std::string& backend) {
  if (backend == "shm") return MakeShmTransport({});
  TcpOptions options;
  options.connections = std::stoi(backend.substr(3));
  return MakeTcpTransport(options);
}

void WaitForEndOfInput() {
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
  std::quick_exit(0);
}

std::shared_ptr<memory::MemoryRegion> Allocate(uint64_t bytes) {
  auto region = memory::MemoryRegion::Allocate("probe", bytes);
  WW_CHECK(region.has_value());
  std::memset((*region)->data(), 0x5a, bytes);
  return *region;
}

/// Answers an 8-byte request with that many bytes, on each accepted socket.
void ServeRaw(uint64_t bytes) {
  auto region = Allocate(bytes);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  WW_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  WW_CHECK(listen(listener, 8) == 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::cout << ntohs(address.sin_port) << std::endl;
  for (int i = 0; i < kRawSockets; ++i) {
    const int fd = accept(listener, nullptr, nullptr);
    std::thread([fd, region] {
      for (uint64_t wanted; recv(fd, &wanted, sizeof(wanted), MSG_WAITALL) == sizeof(wanted);) {
        for (uint64_t sent = 0; sent < wanted;) {
          const ssize_t some = send(fd, region->data() + sent,
                                    std::min<uint64_t>(kChunkBytes, wanted - sent), MSG_NOSIGNAL);
          if (some <= 0) return;
          sent += static_cast<uint64_t>(some);
        }
      }
    }).detach();
  }
  WaitForEndOfInput();
}

void ServeTransport(const std::string& backend, uint64_t bytes) {
  AcceptAll handler;
  auto region = Allocate(bytes);
  auto transport = MakeBackend(backend);
  WW_CHECK(transport->Start(&handler, Incarnation(1)).ok());
  const RegionKey key = transport->Export({{region, 0, bytes}});
  std::cout << transport->address() << ' ' << key.id << ' ' << key.generation << std::endl;
  WaitForEndOfInput();
}

/// This program as a server in another process.
class Server {
 public:
  Server(const std::string& backend, uint64_t bytes) {
    std::string self = "/proc/self/exe";
    std::string serve = "serve";
    std::string name = backend;
    std::string count = std::to_string(bytes);
    char* argv[] = {self.data(), serve.data(), name.data(), count.data(), nullptr};
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
  std::istringstream& words() { return words_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
  int stdin_ = -1;
  std::istringstream words_;
};

/// One way of filling `into`; made once, run many times.
class Way {
 public:
  virtual ~Way() = default;
  virtual void Run() = 0;
  virtual pid_t server() const { return 0; }
};

class Memcpy final : public Way {
 public:
  explicit Memcpy(std::span<std::byte> into) : into_(into), from_(Allocate(into.size())) {}
  void Run() override { std::memcpy(into_.data(), from_->data(), into_.size()); }

 private:
  const std::span<std::byte> into_;
  const std::shared_ptr<memory::MemoryRegion> from_;
};

class RawSockets final : public Way {
 public:
  explicit RawSockets(std::span<std::byte> into) : into_(into), server_("raw", into.size()) {
    uint16_t port = 0;
    server_.words() >> port;
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
    const uint64_t share = into_.size() / kRawSockets;
    for (size_t i = 0; i < kRawSockets; ++i) {
      const uint64_t bytes = i + 1 < kRawSockets ? share : into_.size() - share * (kRawSockets - 1);
      threads.emplace_back(
          [fd = sockets_[i], target = into_.subspan(share * i, bytes)] { Read(fd, target); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  pid_t server() const override { return server_.pid(); }

 private:
  static void Read(int fd, std::span<std::byte> target) {
    const uint64_t bytes = target.size();
    WW_CHECK(send(fd, &bytes, sizeof(bytes), 0) == sizeof(bytes));
    while (!target.empty()) {
      const ssize_t some = recv(fd, target.data(), std::min(kChunkBytes, target.size()), 0);
      WW_CHECK(some > 0);
      target = target.subspan(static_cast<size_t>(some));
    }
  }
  const std::span<std::byte> into_;
  Server server_;
  std::array<int, kRawSockets> sockets_{};
};

/// Keeps kPosted Gets under way until the whole export has been read.
class Reader {
 public:
  Reader(std::shared_ptr<Endpoint> endpoint, RegionKey key, std::span<std::byte> into)
      : endpoint_(std::move(endpoint)), key_(key), into_(into) {}
  void Run() {
    next_ = 0;
    left_ = (into_.size() + kChunkBytes - 1) / kChunkBytes;
    std::promise<void> done;
    done_ = &done;
    for (size_t i = 0; i < kPosted; ++i) PostNext();
    done.get_future().wait();
  }

 private:
  void PostNext() {
    const uint64_t offset = next_.fetch_add(1) * kChunkBytes;
    if (offset >= into_.size()) return;
    const uint64_t bytes = std::min<uint64_t>(kChunkBytes, into_.size() - offset);
    endpoint_->Get(key_, offset, {into_.subspan(offset, bytes)}, 60s, nullptr,
                   [this](Status status) {
                     WW_CHECK(status.ok());
                     PostNext();
                     if (left_.fetch_sub(1) == 1) done_->set_value();
                   });
  }
  const std::shared_ptr<Endpoint> endpoint_;
  const RegionKey key_;
  const std::span<std::byte> into_;
  std::atomic<uint64_t> next_{0};
  std::atomic<uint64_t> left_{0};
  std::promise<void>* done_ = nullptr;
};

class OverTransport final : public Way {
 public:
  OverTransport(const std::string& backend, std::span<std::byte> into)
      : server_(backend, into.size()), transport_(MakeBackend(backend)) {
    std::string address;
    RegionKey key;
    server_.words() >> address >> key.id >> key.generation;
    WW_CHECK(transport_->Start(&handler_, Incarnation(2)).ok());
    Hello hello;
    hello.caller = Incarnation(2);
    hello.callee = Incarnation(1);
    std::promise<std::shared_ptr<Endpoint>> opened;
    transport_->Connect(address, hello, 10s, [&](Result<std::shared_ptr<Endpoint>> endpoint) {
      WW_CHECK(endpoint.has_value());
      opened.set_value(*endpoint);
    });
    reader_ = std::make_unique<Reader>(opened.get_future().get(), key, into);
  }
  void Run() override { reader_->Run(); }
  pid_t server() const override { return server_.pid(); }

 private:
  Server server_;
  AcceptAll handler_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Reader> reader_;
};

/// CPU time of this process, or of `pid`. Unlike the clock's time it hardly depends on what else
/// the host does.
double CpuSeconds(pid_t pid) {
  clockid_t clock = CLOCK_PROCESS_CPUTIME_ID;
  if (pid > 0) clock_getcpuclockid(pid, &clock);
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

struct Contender {
  std::string name;
  std::unique_ptr<Way> way;
  std::vector<double> seconds;
  double cpu_seconds = 0;

  void Measure() {
    const auto cpu = [this] {
      return CpuSeconds(0) + (way->server() > 0 ? CpuSeconds(way->server()) : 0);
    };
    const double cpu_start = cpu();
    const auto start = std::chrono::steady_clock::now();
    way->Run();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    cpu_seconds += cpu() - cpu_start;
  }
};

void Print(std::vector<Contender>& contenders, uint64_t bytes) {
  double raw_best = 0;
  double raw_cpu = 0;
  for (Contender& one : contenders) {
    std::sort(one.seconds.begin(), one.seconds.end());
    const double best = one.seconds.front();
    const double cpu = one.cpu_seconds / static_cast<double>(one.seconds.size());
    if (one.name == "raw4") {
      raw_best = best;
      raw_cpu = cpu;
    }
    std::printf("%-7s best %.3f s  median %.3f s  %5.2f GB/s  cpu %.3f s", one.name.c_str(), best,
                one.seconds[one.seconds.size() / 2], static_cast<double>(bytes) / best / 1e9, cpu);
    if (raw_best > 0) std::printf("  = %.2f, cpu %.2f x raw4", best / raw_best, cpu / raw_cpu);
    std::printf("\n");
  }
}

int Main(const std::vector<std::string>& arguments) {
  if (arguments.size() == 3 && arguments[0] == "serve") {
    const uint64_t bytes = std::stoull(arguments[2]);
    if (arguments[1] == "raw") ServeRaw(bytes);
    ServeTransport(arguments[1], bytes);
  }
  const uint64_t bytes = (arguments.empty() ? 988 : std::stoull(arguments[0])) * 1'000'000;
  const int rounds = arguments.size() > 1 ? std::stoi(arguments[1]) : 5;
  auto region = Allocate(bytes);
  const std::span<std::byte> into(region->data(), bytes);
  std::vector<Contender> contenders;
  contenders.push_back({"memcpy", std::make_unique<Memcpy>(into), {}});
  contenders.push_back({"raw4", std::make_unique<RawSockets>(into), {}});
  for (const char* backend : {"tcp1", "tcp2", "tcp4", "shm"}) {
    contenders.push_back({backend, std::make_unique<OverTransport>(backend, into), {}});
  }
  // In turn, so that a busy minute of the host hits all of them; after a run that warms up.
  for (Contender& one : contenders) one.way->Run();
  for (int round = 0; round < rounds; ++round) {
    for (Contender& one : contenders) one.Measure();
  }
  Print(contenders, bytes);
  return 0;
}

}  // namespace
}  // namespace weightwire::transport

int main(int argc, char** argv) {
  return weightwire::transport::Main(std::vector<std::string>(argv + 1, argv + argc));
}
