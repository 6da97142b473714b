#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "server/metrics/metrics.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

/// Whether weights must go between GPU memory and the network without a copy in host memory.
enum class GpuDirect : int { kAuto = 1, kRequired = 2, kOff = 3 };

struct UcxOptions {
  std::string bind = "127.0.0.1:0";  ///< "host:port" or "[v6]:port", numeric
  /// Host that peers are told, when it is not the bound one (bind "0.0.0.0:…").
  std::string advertised_host;
  std::string tls;  ///< as UCX_TLS ("rc,cuda", "tcp,posix,cma"); empty: the environment's, or UCX's
  /// As UCX_NET_DEVICES ("mlx5_0:1,mlx5_1:1"); empty: the environment's, or as ucx_rails.h chooses.
  std::string devices;
  GpuDirect gpu_direct = GpuDirect::kAuto;
  /// UUIDs ("GPU-8932f937-…") of the GPUs whose memory is exported and read into; none: only host
  /// memory is.
  std::vector<std::string> slab_gpus;
  std::filesystem::path root = "/";  ///< of /sys and /proc
  uint64_t chunk_bytes_max = 64 << 20;
  uint32_t gets_in_flight_max = 64;      ///< per session, ≤ 256
  uint32_t notifies_queued_max = 1024;   ///< per session
  uint32_t inbound_sessions_max = 1024;  ///< a caller is refused while so many sessions are open
  uint32_t inbound_handshakes_max = 64;  ///< connections that have not introduced themselves
  Nanos handshake_timeout = std::chrono::seconds(2);  ///< of an inbound session
  Nanos self_test_timeout = std::chrono::seconds(5);  ///< of a new session, in both directions
  metrics::Sink* metrics = &metrics::Null();          ///< must outlive the transport
};

/// Name "ucx": UCX reads the peer's memory (RDMA where there is a device, else tcp, posix and cma).
/// Peers connect by "host:port" (names are resolved). Needs libweightwire_ucx.so beside the program
/// or on the loader's path, and libucp; Viable() says which of them is missing. What UCX puts on
/// the wire is trusted as far as the network is: payload is neither encrypted nor checksummed.
///
/// choices() names its network devices and why, and with GpuDirect::kAuto what is missing for it;
/// with kRequired this is what Viable() says. Where nothing is missing and it is not off, exports
/// and Gets may be of GPU memory, which UCX registers by whole allocations: whoever has the key of
/// a slab can read all of it. Network devices and GPU-direct are untested on hardware.
///
/// A session is handed out once both sides have read a known pattern from each other; one that
/// fails this is closed, and Connect's failure names the peer, what UCX chose, and a remedy.
std::unique_ptr<Transport> MakeUcxTransport(UcxOptions options);

}  // namespace weightwire::transport
