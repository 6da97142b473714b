#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/device/bytes.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

/// How operations fare that one address posts towards another. Operations are Gets, notifies and
/// maps, counted from 1 since SetLink.
struct FakeLink {
  Nanos latency{0};               ///< one way
  uint64_t bytes_per_second = 0;  ///< payload of Gets, one after another; 0: no limit
  Nanos get_jitter_max{0};        ///< added to each Get by chance, so that Gets overtake each other
  uint64_t drop_at_operation = 0;  ///< this operation breaks the connection; 0: none
  uint64_t corrupt_every_get = 0;  ///< of every n-th Get one byte is changed …; 0: of none
  double corrupt_probability = 1;  ///< … with this probability
  bool refuse_hello = false;       ///< as if the peer's handler rejected the ticket
  bool silent = false;             ///< nothing arrives any more; only deadlines end operations
};

/// How fast one address sends and receives in all, whoever the peers are: payloads of Gets, one
/// after another in the order in which they come. 0: no limit.
struct FakeNic {
  uint64_t egress_bytes_per_second = 0;
  uint64_t ingress_bytes_per_second = 0;
};

struct FakeOptions {
  std::string name = "fake";
  bool map = false;  ///< Map() shares pointers
  bool gets_device_memory = false;
  bool flush_device_writes = false;
  /// How a Get's bytes come to lie in GPU memory. A test's own may be late: then they are seen once
  /// the GPU was told to flush.
  std::function<Status(device::Bytes, device::ConstBytes, uint64_t)> write_device = device::CopyRun;
  uint64_t chunk_bytes_max = 64 << 20;
  uint32_t gets_in_flight_max = 64;
  uint32_t notifies_queued_max = 1024;
};

/// A network inside one thread under virtual time; equal seeds and calls give equal runs.
///
/// Everything runs on `strand`, callbacks too; nothing here is thread-safe. Exception: destroying a
/// transport runs what it still owes (kCancelled, OnClosed) at once. `strand` and `clock` must
/// outlive the network and its transports, which may be destroyed in any order.
class FakeNetwork {
 public:
  FakeNetwork(Executor& strand, Clock& clock, uint64_t seed);
  ~FakeNetwork();

  /// `address` names it; one transport per address at a time.
  std::unique_ptr<Transport> MakeTransport(const std::string& address, FakeOptions options = {});
  /// For all links without one of their own.
  void SetDefaultLink(FakeLink link);
  /// From now on, for operations of `from` on `to`. Restarts the counts.
  void SetLink(const std::string& from, const std::string& to, FakeLink link);
  /// From now on, for all that `address` serves and reads.
  void SetNic(const std::string& address, FakeNic nic);
  /// Breaks every session between the two, as a reset connection does.
  void Break(const std::string& a, const std::string& b);
  /// Bytes that Gets have brought so far, sums included.
  uint64_t bytes_delivered() const;
  /// Of these, those that lay in host memory on either side.
  uint64_t bytes_through_host() const;

  struct World;

 private:
  std::shared_ptr<World> world_;
};

}  // namespace weightwire::transport
