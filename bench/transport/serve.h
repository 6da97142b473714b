#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "server/memory/region.h"
#include "server/transport/transport.h"

/// The side that holds the bytes: this program in another process.
namespace weightwire::bench {

inline constexpr size_t kCallBytes = 4 << 20;

/// Takes any peer.
class AcceptAll final : public transport::Handler {
 public:
  Result<Ticket> OnHello(const transport::CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<transport::Endpoint>) override {}
  void OnNotify(const std::shared_ptr<transport::Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<transport::Endpoint>&, const Status&) override {}
};

/// "shm", "tcp-N" with N connections, "tcp-N-mac" with a MAC of each frame, "tcp-N-tls"
/// under TLS, "ucx:TLS" with UCX_TLS.
std::unique_ptr<transport::Transport> MakeBackend(const std::string& way);

/// Filled with what HoldsPattern looks for.
std::shared_ptr<memory::MemoryRegion> MakeSource(uint64_t bytes);
bool HoldsPattern(std::span<const std::byte> bytes);

/// Prints where and what to read, serves "raw-N" or a transport, ends with stdin.
[[noreturn]] void Serve(const std::string& way, uint64_t bytes);

}  // namespace weightwire::bench
