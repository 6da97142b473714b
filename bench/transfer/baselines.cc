#include "bench/transfer/baselines.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "server/base/status.h"

namespace weightwire::bench {
namespace {

constexpr uint64_t kBlockBytes = 1 << 20;

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Reads its share over and over, and answers each with one byte. Ends with the connection.
void ReadShare(int socket, std::byte* into, uint64_t bytes) {
  while (true) {
    for (uint64_t at = 0; at < bytes;) {
      const ssize_t got = recv(socket, into + at, std::min(kBlockBytes, bytes - at), 0);
      if (got <= 0) return;
      at += static_cast<uint64_t>(got);
    }
    const char done = 1;
    if (send(socket, &done, 1, 0) != 1) return;
  }
}

void WriteShare(int socket, const std::byte* from, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t sent = send(socket, from + at, std::min(kBlockBytes, bytes - at), 0);
    WW_CHECK(sent > 0);
    at += static_cast<uint64_t>(sent);
  }
  char done = 0;
  WW_CHECK(recv(socket, &done, 1, 0) == 1);
}

std::pair<int, int> ConnectedPair() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  WW_CHECK(bind(listener, generic, size) == 0 && listen(listener, 1) == 0);
  WW_CHECK(getsockname(listener, generic, &size) == 0);
  const int client = socket(AF_INET, SOCK_STREAM, 0);
  WW_CHECK(connect(client, generic, size) == 0);
  const int server = accept(listener, nullptr, nullptr);
  WW_CHECK(server >= 0);
  close(listener);
  const int on = 1;
  for (int end : {client, server}) setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return {client, server};
}

template <typename Work>
void InThreads(int count, uint64_t bytes, const Work& work) {
  std::vector<std::thread> threads;
  const uint64_t share = bytes / static_cast<uint64_t>(count);
  for (int i = 0; i < count; ++i) {
    const uint64_t begin = share * static_cast<uint64_t>(i);
    const uint64_t end = i + 1 == count ? bytes : begin + share;
    threads.emplace_back([&work, i, begin, end] { work(i, begin, end - begin); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

double MemcpySeconds(std::byte* target, const std::byte* source, uint64_t bytes) {
  const auto start = std::chrono::steady_clock::now();
  std::memcpy(target, source, bytes);
  return SecondsSince(start);
}

RawSockets::RawSockets(int connections, uint64_t bytes) : connections_(connections), bytes_(bytes) {
  std::vector<int> theirs;
  for (int i = 0; i < connections; ++i) {
    const auto [client, server] = ConnectedPair();
    sockets_.push_back(client);
    theirs.push_back(server);
  }
  child_ = fork();
  WW_CHECK(child_ >= 0);
  for (int unused : child_ == 0 ? sockets_ : theirs) close(unused);
  if (child_ != 0) return;
  auto* into = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
  InThreads(connections_, bytes, [&](int i, uint64_t begin, uint64_t share) {
    ReadShare(theirs[static_cast<size_t>(i)], into + begin, share);
  });
  _exit(0);
}

double RawSockets::SendSeconds(const std::byte* source) {
  const auto start = std::chrono::steady_clock::now();
  InThreads(connections_, bytes_, [&](int i, uint64_t begin, uint64_t share) {
    WriteShare(sockets_[static_cast<size_t>(i)], source + begin, share);
  });
  return SecondsSince(start);
}

RawSockets::~RawSockets() {
  for (int socket : sockets_) close(socket);
  waitpid(child_, nullptr, 0);
}

}  // namespace weightwire::bench
