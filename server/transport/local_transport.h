#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "server/base/executor.h"
#include "server/metrics/metrics.h"
#include "server/transport/local_devices.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

struct LocalOptions {
  /// "@name" in the abstract namespace (one network namespace, so one pod), or a path, which is
  /// removed at the end. Empty: a random abstract name.
  std::string address;
  int copy_threads = 2;  ///< of Get; Map needs none
  uint64_t chunk_bytes_max = 64 << 20;
  uint32_t gets_in_flight_max = 64;      ///< per session, ≤ 256
  uint32_t notifies_queued_max = 1024;   ///< per session
  uint32_t inbound_sessions_max = 1024;  ///< a caller is refused while so many sessions are open
  uint32_t inbound_handshakes_max = 64;  ///< accepted sockets that have not introduced themselves
  Nanos handshake_timeout = std::chrono::seconds(2);  ///< of an inbound session
  metrics::Sink* metrics = &metrics::Null();          ///< must outlive the transport
};

class LocalCore;
class LocalListener;

/// What the back ends for processes of one user on one host are but for their memory: sessions over
/// a Unix socket, on which regions are passed as file descriptors and mapped read-only, once for
/// each session. A Get is a copy from the mapping by the copy threads, between a request and a
/// message that ends it, so that Revoke knows when the reader has stopped. Map gives the mapping
/// itself. A peer of another uid is refused, because a mapped peer can harm its reader (holes
/// punched into its memory read as zeros, sparse memory is charged to who touches it).
///
/// A mapping is kept, and with it the memory, until the session ends or the exporter, at a later
/// call of any kind, finds that the region is gone on its side.
class LocalTransport : public Transport {
 public:
  /// `devices` null: host memory only.
  LocalTransport(std::string name, LocalOptions options, std::unique_ptr<LocalDevices> devices);
  ~LocalTransport() override;

  const std::string& name() const override;
  Capabilities capabilities() const override;
  Status Viable() const override;
  Status Start(Handler* handler, Incarnation self) override;
  std::string address() const override;
  RegionKey Export(GatherList pieces) override;
  void Revoke(RegionKey key, std::function<void()> done) override;
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override;

 protected:
  /// Runs `task` on the transport's thread.
  void Post(Task task);

 private:
  const std::shared_ptr<LocalCore> core_;
  const std::shared_ptr<LocalListener> listener_;
};

}  // namespace weightwire::transport
