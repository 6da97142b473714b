#include "server/daemon/agent_role.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "server/base/strand_call.h"
#include "server/daemon/data_tls.h"
#include "server/daemon/directories.h"
#include "server/daemon/gpu_memory.h"
#include "server/daemon/host_identity.h"
#include "server/daemon/pages.h"
#include "server/daemon/tls_setup.h"
#include "server/rpc/coordinator_client.h"
#include "server/rpc/local_coordinator_port.h"
#include "server/rpc/log_fields.h"
#include "server/rpc/random.h"
#include "server/transfer/staging.h"
#include "server/transport/cuda_ipc/cuda_ipc_transport.h"
#include "server/transport/nccl/nccl_transport.h"
#include "server/transport/shm/shm_transport.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/ucx/ucx_transport.h"

namespace weightwire::daemon {
namespace {

constexpr char kServiceName[] = "weightwire.v1.Agent";
constexpr std::chrono::milliseconds kDrainLimit(1'500);
constexpr std::chrono::milliseconds kTransfersLimit(500);
constexpr std::chrono::milliseconds kCallsLimit(300);
constexpr std::chrono::seconds kSessionCheck(1);

std::unique_ptr<transport::Transport> MakeTransport(const std::string& name, const Config& config,
                                                    std::shared_ptr<DataTls> tls,
                                                    const memory::GpuMemoryPools& gpu_pools,
                                                    metrics::Sink& metrics) {
  if (name == "shm") {
    transport::ShmOptions options;
    options.metrics = &metrics;
    return transport::MakeShmTransport(options);
  }
  if (name == "cuda_ipc") {
    transport::CudaIpcOptions options;
    options.local.metrics = &metrics;
    for (const auto& [uuid, pool] : gpu_pools.by_device) {
      options.devices.emplace(uuid, pool->device().shared_from_this());
    }
    options.none = gpu_pools.none;
    return transport::MakeCudaIpcTransport(std::move(options));
  }
  if (name == "nccl") {
    transport::NcclOptions options;
    options.sessions.bind = config.nccl_listen;
    options.sessions.advertised_host = config.advertise_host;
    options.sessions.traffic_class = static_cast<uint8_t>(config.traffic_class);
    options.sessions.metrics = &metrics;
    options.nccl_library = config.nccl_library;
    options.cuda_library = config.gpu_library;
    options.form_timeout = std::chrono::milliseconds(config.nccl_form_timeout_ms);
    for (const auto& [uuid, pool] : gpu_pools.by_device) {
      options.devices.emplace(uuid, pool->device().shared_from_this());
    }
    options.none = gpu_pools.none;
    return transport::MakeNcclTransport(std::move(options));
  }
  if (name == "ucx") {
    transport::UcxOptions options;
    options.bind = config.ucx_listen;
    options.advertised_host = config.advertise_host;
    options.tls = config.ucx_tls;
    options.devices = config.ucx_devices;
    options.gpu_direct = config.gpu_direct;
    for (const auto& [uuid, slab] : gpu_pools.by_device) {
      options.slab_gpus.push_back(device::ToString(uuid));
    }
    options.metrics = &metrics;
    return transport::MakeUcxTransport(std::move(options));
  }
  transport::TcpOptions options;
  options.bind = config.data_listen;
  options.advertised_host = config.advertise_host;
  options.connections = static_cast<int>(config.tcp_connections);
  options.near_connections = static_cast<int>(config.tcp_io_threads);
  options.integrity = config.integrity;
  options.tls_peers = std::move(tls);
  options.traffic_class = static_cast<uint8_t>(config.traffic_class);
  options.io_threads = static_cast<int>(config.tcp_io_threads);
  options.metrics = &metrics;
  return transport::MakeTcpTransport(std::move(options));
}

transfer::Tuning TuningOf(const Config& config) {
  transfer::Tuning out;
  out.segment_bytes_max = static_cast<int64_t>(config.segment_bytes_max);
  out.slot_bytes = static_cast<int64_t>(config.slot_bytes);
  out.slots_in_pool = config.slots_in_pool;
  out.window = config.window;
  out.rate_limit = config.rate_limit;
  out.peer_rate_limit = config.peer_rate_limit;
  out.chunk_bytes = static_cast<int64_t>(config.chunk_bytes);
  out.gets_in_flight = config.gets_in_flight;
  out.progress_timeout = std::chrono::milliseconds(config.progress_timeout_ms);
  return out;
}

void SayWhatGpuDirectTakes(const Config& config) {
  const uint64_t bytes = transfer::GpuPoolBytes(TuningOf(config));
  if (bytes <= config.gpu_slab_bytes) {
    spdlog::info("gpu: {} of {} bytes of each GPU are slots and scratch for GPU-direct", bytes,
                 config.gpu_slab_bytes);
  } else {
    spdlog::warn("gpu: no GPU-direct: its slots and scratch take {} bytes, gpu_slab_bytes is {}",
                 bytes, config.gpu_slab_bytes);
  }
}

/// An engine that was left behind by a COMMIT keeps its pod out of the traffic until it is filled.
/// One that serves stays in it while the coordinator is gone.
Status Readiness(const agent::Agent& agent) {
  bool serves = false;
  for (const agent::LocalStatus& local : agent.Local()) {
    serves |= local.serving != Epoch{};
    if (local.serving >= local.behind) continue;
    return Status(Code::kUnavailable, Reason::kNotReady,
                  "serves epoch " + std::to_string(local.serving.value) + "; epoch " +
                      std::to_string(local.behind.value) + " was committed without it")
        .AtRank(local.group + "/" + std::to_string(local.rank))
        .Remedy("it is filled from a peer; `wwctl engines` shows how far it is behind");
  }
  return serves ? OkStatus() : agent.SessionStatus();
}

}  // namespace

Result<std::unique_ptr<AgentRole>> AgentRole::Start(const Config& config, const Host& host,
                                                    CoordinatorRole* embedded) {
  std::unique_ptr<AgentRole> role(new AgentRole());
  role->incarnation_ = Incarnation(rpc::RandomNonZero());
  WW_ASSIGN(role->gpu_pools_, LendGpuMemory(config));
  WW_FAIL_IF_ERROR(role->MakeTransports(config, host));
  WW_FAIL_IF_ERROR(role->MakeAgent(config, host, embedded));
  WW_FAIL_IF_ERROR(role->Serve(config, host));
  OnStrand(role->strand_, [&role] {
    role->agent_->Start();
    role->WatchSession();
  });
  return role;
}

AgentRole::~AgentRole() { Stop(); }

Status AgentRole::MakeTransports(const Config& config, const Host& host) {
  std::shared_ptr<DataTls> tls;
  if (config.integrity == transport::Integrity::kTls) {
    WW_ASSIGN_OR_STATUS(tls, DataTls::Make(TlsFilesOf(config), *host.identity));
  }
  std::vector<transport::Transport*> viable;
  for (const std::string& name : config.transports) {
    auto transport = MakeTransport(name, config, tls, gpu_pools_, host.metrics);
    if (Status can = transport->Viable(); !can.ok()) {
      // Going on with another transport would be the fallback that the setting forbids.
      const bool direct = name == "ucx" || name == "nccl";
      if (direct && config.gpu_direct == transport::GpuDirect::kRequired) return can;
      spdlog::warn("transport {} cannot run here: {}", name, can.ToString());
      continue;
    }
    const std::string choices = transport->choices();
    if (!choices.empty()) spdlog::info("transport {}: {}", name, choices);
    if (transport->capabilities().gets_device_memory) SayWhatGpuDirectTakes(config);
    viable.push_back(transport.get());
    transports_.push_back(std::move(transport));
  }
  if (viable.empty()) {
    return Status(Code::kFailedPrecondition, Reason::kTransportFailed,
                  "none of the configured transports can run here");
  }
  transfer::Options options{TuningOf(config), HostIdentity(), incarnation_, config.transports};
  if (!config.transport_failover) options.avoid_after_failure = Nanos(0);
  // Without TLS tickets come in the open, and to prove them instead of showing them would keep
  // nobody out who can read along.
  options.proof_required = TlsFilesOf(config).given();
  options.gpu_pools = gpu_pools_;
  options.gpu_direct_required = config.gpu_direct == transport::GpuDirect::kRequired;
  auto engine = OnStrand(strand_, [&] {
    return transfer::Engine::Make(std::move(options), host.clock, strand_, host.workers, viable,
                                  host.metrics);
  });
  if (!engine) return std::move(engine.error());
  transfers_ = std::move(*engine);
  for (const auto& transport : transports_) addresses_[transport->name()] = transport->address();
  return OkStatus();
}

Status AgentRole::MakeAgent(const Config& config, const Host& host, CoordinatorRole* embedded) {
  if (embedded != nullptr) {
    port_ = rpc::MakeLocalCoordinatorPort(embedded->coordinator(), embedded->strand(), strand_);
  } else {
    rpc::CoordinatorClientOptions options;
    options.addresses = config.coordinator;
    options.message_bytes_max = config.message_bytes_max;
    options.tls = TlsFilesOf(config);
    port_ = rpc::MakeGrpcCoordinatorClient(std::move(options), strand_);
  }
  agent::Options options;
  options.job = config.job;
  options.name = config.name;
  options.incarnation = incarnation_;
  options.host = HostIdentity();
  options.addresses = addresses_;
  options.stage_bytes_max = config.stage_bytes_max;
  options.delta = {config.delta, config.delta_chain_max, config.delta_folder};
  options.retain_versions = config.retain_versions;
  options.gpu_pools = gpu_pools_;
  options.notes = rpc::LogNote;
  options.room_deadline = std::chrono::milliseconds(config.room_deadline_ms);
  options.stale_after = std::chrono::milliseconds(config.stale_after_ms);
  processes_ = std::make_shared<rpc::LocalProcesses>(host.clock);
  options.stopped = [processes = processes_](int64_t pid) { return processes->Stopped(pid); };
  options.process_ended = [processes = processes_](int64_t pid) { return processes->Ended(pid); };
  options.refused = [processes = processes_] { return processes->Refusals(); };
  agent_ = OnStrand(strand_, [&] {
    return agent::Agent::Make(std::move(options), host.clock, strand_, host.workers, *port_,
                              *transfers_, host.metrics);
  });
  return OkStatus();
}

Status AgentRole::Serve(const Config& config, const Host& host) {
  const std::string folder = DirectoryOf(config.agent_socket);
  const rpc::UnixAccess access{config.allow_uids, config.socket_group};
  if (access.uids.empty()) {
    WW_RETURN_IF_ERROR(MakePrivateDirectory(folder));
  } else {
    WW_RETURN_IF_ERROR(MakeSocketDirectory(folder, access.group));
    if (const std::string closed = ClosedAbove(folder, access.group); !closed.empty()) {
      spdlog::warn(
          "allow_uids: {} does not let {} pass: they do not reach agent_socket, {}; choose a path "
          "that "
          "they can enter",
          closed, access.group ? "members of socket_group" : "other users", config.agent_socket);
    }
  }
  const auto refused = [processes = processes_](uint32_t uid) {
    if (!processes->Refused(uid)) return;
    spdlog::warn(
        "refused a process of uid {}: this agent has uid {}; run both as the same user "
        "(runAsUser), or name uid {} in allow_uids",
        uid, geteuid(), uid);
  };
  fds_ = std::make_unique<rpc::FdTable>(host.clock);
  fd_server_ = rpc::FdServer::Make(host.io, *fds_);
  const auto message_bytes_max = static_cast<size_t>(config.message_bytes_max);
  service_ = rpc::AgentService::Make({strand_, host.clock, host.metrics, message_bytes_max},
                                     *agent_, *fds_, addresses_);
  WW_ASSIGN_OR_STATUS(server_,
                      rpc::GrpcServer::Start({message_bytes_max, nullptr}, {service_->service()}));
  WW_ASSIGN_OR_STATUS(fd_acceptor_, rpc::Acceptor::ListenUnix(
                                        host.io, config.agent_socket + ".fd", host.metrics, access,
                                        [this](memory::UniqueFd connection) {
                                          fd_server_->Serve(std::move(connection));
                                        },
                                        refused));
  WW_ASSIGN_OR_STATUS(acceptor_, rpc::Acceptor::ListenUnix(
                                     host.io, config.agent_socket, host.metrics, access,
                                     [this](memory::UniqueFd connection) {
                                       processes_->Connected(connection.get());
                                       server_->HandOver(std::move(connection));
                                     },
                                     refused));
  return OkStatus();
}

void AgentRole::WatchSession() {
  if (!agent_) return;
  server_->SetServing(kServiceName, agent_->SessionStatus().ok());
  strand_.PostAfter(kSessionCheck, [this] { WatchSession(); });
}

Window AgentRole::window() {
  return {&strand_, [this] { return Readiness(*agent_); },
          [this] { return AgentPage(agent_->SessionStatus(), transports_, agent_->Local()); }};
}

bool AgentRole::AwaitSession(Nanos limit) {
  // Asked again and again for want of an event; only while the process starts.
  const Nanos end = SystemClock().Now() + limit;
  while (!OnStrand(strand_, [this] { return agent_->SessionStatus().ok(); })) {
    if (SystemClock().Now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  OnStrand(strand_, [this] { server_->SetServing(kServiceName, true); });
  return true;
}

Status AgentRole::SessionStatus() {
  return OnStrand(strand_, [this] { return agent_->SessionStatus(); });
}

void AgentRole::Stop() {
  if (acceptor_) acceptor_->Close();
  if (fd_acceptor_) fd_acceptor_->Close();
  if (agent_) {
    const bool drained = AwaitOnStrand(strand_, kDrainLimit,
                                       [this](auto done) { agent_->Shutdown(std::move(done)); });
    if (!drained) spdlog::warn("the agent did not drain in time");
  }
  const Status why(Code::kUnavailable, Reason::kShuttingDown, "the agent is shutting down");
  if (service_) service_->EndStreams(why);
  if (server_) server_->Shutdown(kCallsLimit);
  if (fd_server_) fd_server_->CloseAll();
  if (transfers_) {
    AwaitOnStrand(strand_, kTransfersLimit,
                  [this](auto done) { transfers_->Shutdown(std::move(done)); });
    OnStrand(strand_, [this] {
      agent_.reset();
      port_.reset();
    });
  }
  // A session that a peer ends late is still told to the engine, which therefore goes last.
  transports_.clear();
  if (transfers_) OnStrand(strand_, [this] { transfers_.reset(); });
  strand_.Stop();
}

}  // namespace weightwire::daemon
