#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "server/device/device.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

struct NcclOptions {
  /// Of the sessions, which are of tcp: where it listens, its bounds and metrics. Integrity kCrc.
  TcpOptions sessions;
  std::string library;       ///< libweightwire_nccl.so; empty: beside the program
  std::string nccl_library;  ///< empty: "libnccl.so.2", by the loader's search
  std::string cuda_library;  ///< libweightwire_cuda.so, as `devices` have it
  std::map<device::Uuid, std::shared_ptr<device::Device>> devices;  ///< whose memory it reaches
  Status none;  ///< why there is none, where `devices` is empty
  /// Of one round: what is sent at once. Taken of each GPU as often as rounds may run there, for
  /// sending and for receiving.
  uint64_t buffer_bytes = 16 << 20;
  uint32_t rounds_max = 4;  ///< that run at once on one GPU, in each direction
  /// Of a communicator; that of Connect is for the session below.
  Nanos form_timeout = std::chrono::seconds(20);
  Nanos exchange_timeout = std::chrono::seconds(60);  ///< of a round, at the latest
  Nanos release_grace = std::chrono::seconds(10);     ///< for NCCL to give a communicator back
};

/// Name "nccl": payload goes from GPU to GPU by NCCL's send and receive. For agents of one job that
/// stay, in clouds and NVLink domains where NCCL is what is tuned. UNTESTED ON HARDWARE.
///
/// A session is one of tcp, which carries who may speak, requests and notifies. Each GPU that reads
/// over it has a lane: a communicator of two with a GPU of the peer, formed when it is first
/// needed. Its unique id goes over the session, whose ends have proved who they are; so the
/// coordinator's broker, which is for groups of applications, is not asked. A session is handed out
/// once its first lane is formed and has carried a pattern.
///
/// NCCL touches buffers of our own only, which are copied from and to within the GPU: what a peer
/// that is lost leaves behind inside NCCL never has a tensor's memory. Nothing waits without a
/// bound: a lane that fails, in any way, ends its session, and the next one forms anew. Where NCCL
/// does not give a communicator back, Reaches refuses from then on, so that peers are read over the
/// next transport, and the GPU keeps that buffer until the process ends.
///
/// Get and Export take memory of `devices` and of the host, which is copied to the GPU. Payload is
/// neither encrypted nor checksummed: that is the business of transfer/, and of the network.
std::unique_ptr<Transport> MakeNcclTransport(NcclOptions options);

}  // namespace weightwire::transport
