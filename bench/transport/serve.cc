#include "bench/transport/serve.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <thread>

#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/ucx/ucx_transport.h"
#include "tests/support/tls_for_tests.h"

namespace weightwire::bench {
namespace {

constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

void WaitForEndOfInput() {
  char byte;
  while (read(STDIN_FILENO, &byte, 1) > 0) {
  }
}

/// Answers an 8-byte request with that many bytes, on each of `sockets` accepted ones.
void ServeRaw(int sockets, uint64_t bytes) {
  auto region = MakeSource(bytes);
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  WW_CHECK(bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  WW_CHECK(listen(listener, sockets) == 0);
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  std::cout << ntohs(address.sin_port) << std::endl;
  for (int i = 0; i < sockets; ++i) {
    const int fd = accept(listener, nullptr, nullptr);
    std::thread([fd, region] {
      for (uint64_t range[2]; recv(fd, range, sizeof(range), MSG_WAITALL) == sizeof(range);) {
        for (uint64_t sent = 0; sent < range[1];) {
          const ssize_t some = send(fd, region->data() + range[0] + sent,
                                    std::min<uint64_t>(kCallBytes, range[1] - sent), MSG_NOSIGNAL);
          if (some <= 0) return;
          sent += static_cast<uint64_t>(some);
        }
      }
    }).detach();
  }
  WaitForEndOfInput();
  std::quick_exit(0);  // the threads wait in recv
}

void ServeTransport(const std::string& way, uint64_t bytes) {
  AcceptAll handler;
  auto region = MakeSource(bytes);
  auto backend = MakeBackend(way);
  if (Status started = backend->Start(&handler, Incarnation(1)); !started.ok()) {
    std::cerr << started.ToString() << std::endl;
    std::quick_exit(1);
  }
  const transport::RegionKey key = backend->Export({{region, 0, bytes}});
  std::cout << backend->address() << ' ' << key.id << ' ' << key.generation << std::endl;
  WaitForEndOfInput();
}

}  // namespace

std::unique_ptr<transport::Transport> MakeBackend(const std::string& way) {
  if (way == "shm") return transport::MakeShmTransport({});
  if (way.starts_with("ucx:")) {
    transport::UcxOptions options;
    options.tls = way.substr(4);
    return transport::MakeUcxTransport(options);
  }
  WW_CHECK(way.starts_with("tcp-"));
  transport::TcpOptions options;
  options.connections = options.near_connections = std::stoi(way.substr(4));
  if (way.ends_with("-mac")) options.integrity = transport::Integrity::kMac;
  if (way.ends_with("-tls")) options.integrity = transport::Integrity::kTls;
  options.tls_peers = testing::TlsPeersFor(options.integrity);
  return transport::MakeTcpTransport(options);
}

std::shared_ptr<memory::MemoryRegion> MakeSource(uint64_t bytes) {
  auto region = memory::MemoryRegion::Allocate("bench", bytes);
  WW_CHECK(region.has_value());
  for (uint64_t at = 0; at + sizeof(uint64_t) <= bytes; at += sizeof(uint64_t)) {
    const uint64_t word = (at + 1) * kOdd;
    std::memcpy((*region)->data() + at, &word, sizeof(word));
  }
  return *region;
}

bool HoldsPattern(std::span<const std::byte> bytes) {
  for (uint64_t at = 0; at + sizeof(uint64_t) <= bytes.size(); at += sizeof(uint64_t)) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof(word));
    if (word != (at + 1) * kOdd) return false;
  }
  return true;
}

void Serve(const std::string& way, uint64_t bytes) {
  if (way.starts_with("raw-")) ServeRaw(std::stoi(way.substr(4)), bytes);
  ServeTransport(way, bytes);
  std::exit(0);
}

}  // namespace weightwire::bench
