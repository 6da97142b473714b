// The other process of the crash tests. It lives until it is killed or its stdin ends.
//
//   conformance_peer serve BACKEND TUNING BYTES
//       exports BYTES of the pattern; prints "ADDRESS INCARNATION ID GENERATION"
//   conformance_peer serve-gpu cuda_ipc 1 BYTES
//       the same; exports BYTES of the pattern from each of: GPU 0, the host, GPU 1, GPU 0 again
//   conformance_peer read BACKEND TUNING BYTES ADDRESS INCARNATION ID GENERATION
//       reads the export for ever, and notifies "reading" once the first Get has ended
//   conformance_peer map cuda_ipc 1 BYTES ADDRESS INCARNATION ID GENERATION
//       maps the export and keeps it; notifies "mapped" when its first piece has the pattern
//
// TUNING: of tcp its connections, with "+mac" behind them where frames are sealed and "+tls" under
// TLS; of ucx what UCX_TLS takes.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "server/transport/cuda_ipc/cuda_ipc_transport.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/ucx/ucx_transport.h"
#include "tests/conformance/fake_nccl_transport.h"
#include "tests/conformance/pattern.h"
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/support/tls_for_tests.h"

namespace weightwire::conformance {
namespace {

using namespace std::chrono_literals;  // NOLINT: a program
using transport::Endpoint;

/// As the rig's, which this program does not link.
Ticket TheTicket() {
  Ticket ticket;
  for (size_t i = 0; i < ticket.size(); ++i) ticket[i] = static_cast<uint8_t>(7 * i + 1);
  return ticket;
}

class AcceptAll final : public transport::Handler {
 public:
  Result<Ticket> OnHello(const transport::CallerHello&) override { return TheTicket(); }
  void OnAccepted(std::shared_ptr<Endpoint>) override {}
  void OnNotify(const std::shared_ptr<Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<Endpoint>&, const Status&) override {}
};

std::unique_ptr<transport::Transport> Make(const std::string& backend, const std::string& tuning) {
  if (backend == "shm") return transport::MakeShmTransport({});
  if (backend == "cuda_ipc") {
    return transport::MakeCudaIpcTransport({{}, testing::FakeDevices(), {}});
  }
  if (backend == "nccl") return MakeFakeNccl({}, 0);
  if (backend == "ucx") {
    transport::UcxOptions ucx;
    ucx.tls = tuning;
    return transport::MakeUcxTransport(ucx);
  }
  transport::TcpOptions options;
  options.connections = options.near_connections = std::stoi(tuning);
  if (tuning.ends_with("+mac")) options.integrity = transport::Integrity::kMac;
  if (tuning.ends_with("+tls")) options.integrity = transport::Integrity::kTls;
  options.tls_peers = testing::TlsPeersFor(options.integrity);
  return transport::MakeTcpTransport(options);
}

void ReadOn(const std::shared_ptr<Endpoint>& endpoint, transport::RegionKey key,
            const std::shared_ptr<std::vector<std::byte>>& buffer, bool first) {
  endpoint->Get(key, 0, {*buffer}, 60s, buffer, [=](Status status) {
    if (!status.ok()) return;
    if (first) static_cast<void>(endpoint->Notify(std::as_bytes(std::span("reading", 7))));
    ReadOn(endpoint, key, buffer, false);
  });
}

std::shared_ptr<memory::MemoryRegion> Slab(size_t gpu, const std::vector<std::byte>& content) {
  auto region = testing::FakeSlabs(gpu)->Allocate("peer", content.size()).value();
  WW_CHECK(device::CopyRun(region->bytes(), content.data(), content.size()).ok());
  return region;
}

transport::GatherList OnGpusAndHost(uint64_t bytes) {
  std::vector<std::byte> content(bytes);
  FillPattern(content, 0);
  auto host = memory::MemoryRegion::Allocate("peer", bytes).value();
  std::ranges::copy(content, host->data());
  return {{Slab(0, content), 0, bytes},
          {host, 0, bytes},
          {Slab(1, content), 0, bytes},
          {Slab(0, content), 0, bytes}};
}

void MapAndKeep(const std::shared_ptr<Endpoint>& endpoint, transport::RegionKey key) {
  endpoint->Map(key, 60s, [=](Result<transport::MappedList> mapped) {
    if (!mapped) std::exit(3);
    static std::vector<transport::MappedList> kept;
    kept.push_back(*mapped);
    const transport::MappedPiece& first = mapped->pieces.front();
    std::vector<std::byte> seen(first.bytes);
    if (!device::CopyRun({seen.data()}, first.at, first.bytes).ok()) std::exit(4);
    if (FirstDifference(seen, 0) != -1) std::exit(5);
    static_cast<void>(endpoint->Notify(std::as_bytes(std::span("mapped", 6))));
  });
}

int Main(const std::vector<std::string>& arguments) {
  AcceptAll handler;
  const Incarnation self(4711);
  auto transport = Make(arguments.at(1), arguments.at(2));
  if (!transport->Start(&handler, self).ok()) return 1;
  const uint64_t bytes = std::stoull(arguments.at(3));
  const std::string& role = arguments.at(0);
  if (role == "serve" || role == "serve-gpu") {
    transport::GatherList pieces;
    if (role == "serve-gpu") {
      pieces = OnGpusAndHost(bytes);
    } else {
      auto region = memory::MemoryRegion::Allocate("peer", bytes);
      if (!region.has_value()) return 1;
      FillPattern({(*region)->data(), bytes}, 0);
      pieces = {{*region, 0, bytes}};
    }
    const transport::RegionKey key = transport->Export(pieces);
    std::cout << transport->address() << ' ' << self.value << ' ' << key.id << ' ' << key.generation
              << std::endl;
  } else {
    transport::Hello hello;
    hello.caller = self;
    hello.callee = Incarnation(std::stoull(arguments.at(5)));
    hello.ticket = TheTicket();
    const transport::RegionKey key{std::stoull(arguments.at(6)), std::stoull(arguments.at(7))};
    transport->Connect(arguments.at(4), hello, 60s,
                       [key, bytes, role](Result<std::shared_ptr<Endpoint>> endpoint) {
                         if (!endpoint.has_value()) std::exit(2);
                         if (role == "map") return MapAndKeep(*endpoint, key);
                         for (int i = 0; i < 4; ++i) {
                           ReadOn(*endpoint, key, std::make_shared<std::vector<std::byte>>(bytes),
                                  i == 0);
                         }
                       });
  }
  char ignored;
  while (read(STDIN_FILENO, &ignored, 1) > 0) {
  }
  std::quick_exit(0);
}

}  // namespace
}  // namespace weightwire::conformance

int main(int argc, char** argv) {
  return weightwire::conformance::Main(std::vector<std::string>(argv + 1, argv + argc));
}
