// What a configuration says of itself, of this host's limits, and of others that it must fit.
#include <algorithm>
#include <set>

#include "client/cli/doctor.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/daemon/listen_address.h"

namespace weightwire::cli {
namespace {

using daemon::Config;
using daemon::HasAgent;
using daemon::HasCoordinator;

constexpr uint64_t kPeersExpected = 64;
constexpr uint64_t kOpenFilesOfAgent = 256;         ///< memory, sockets of clients, libraries
constexpr uint64_t kOpenFilesOfCoordinator = 1024;  ///< one for each agent
constexpr uint64_t kShmOfUcx = 64 << 20;

bool Names(const Config& config, const char* transport) {
  const auto& names = config.transports;
  return std::find(names.begin(), names.end(), transport) != names.end();
}

bool OnLoopback(const std::string& address) {
  const auto parsed = daemon::ParseHostPort(address);
  return parsed && daemon::IsLoopback(parsed->host);
}

/// An agent that joins a coordinator of another host has peers on other hosts.
bool JoinsAnotherHost(const Config& config) {
  return config.role == daemon::Role::kAgent &&
         std::any_of(config.coordinator.begin(), config.coordinator.end(),
                     [](const std::string& address) { return !OnLoopback(address); });
}

std::string Bytes(uint64_t bytes) { return BytesText(static_cast<int64_t>(bytes)); }

void CheckListening(const NamedConfig& named, Findings& out) {
  const Config& config = named.config;
  if (config.insecure) {
    std::vector<std::string> open;
    if (HasCoordinator(config.role) && !OnLoopback(config.listen)) open.push_back("listen");
    if (HasAgent(config.role) && !OnLoopback(config.data_listen)) open.push_back("data_listen");
    if (!config.http.empty() && !OnLoopback(config.http)) open.push_back("http");
    if (!open.empty()) {
      out.push_back({"insecure", named.path,
                     "whoever reaches " + Joined(open) + " may read, replace or stop what moves",
                     "listen on loopback, or let a network policy admit this job's hosts only"});
    }
  }
  if (!JoinsAnotherHost(config)) return;
  if (Names(config, "tcp") && OnLoopback(config.data_listen)) {
    out.push_back({"data_listen", named.path,
                   "the coordinator is on another host, but " + config.data_listen +
                       " can be reached from this one only: transfers over tcp will fail",
                   "set data_listen to an address of this host that its peers reach"});
  }
  if (!config.advertise_host.empty() && daemon::IsLoopback(config.advertise_host)) {
    out.push_back({"advertise_host", named.path,
                   "peers on other hosts are told to connect to " + config.advertise_host,
                   "set advertise_host to the name or address by which peers reach this host"});
  }
}

void CheckGpu(const NamedConfig& named, Findings& out) {
  const Config& config = named.config;
  if (!HasAgent(config.role) || config.gpu == daemon::Gpu::kOff || Names(config, "cuda_ipc")) {
    return;
  }
  out.push_back({"gpu", named.path,
                 "gpu is on, but transports does not name cuda_ipc: bytes of GPU memory go through "
                 "host memory, also between ranks of this agent",
                 "put cuda_ipc first in transports"});
}

void CheckBetween(const NamedConfig& a, const NamedConfig& b, Findings& out) {
  if (a.config.job != b.config.job) {
    out.push_back({"job", b.path,
                   "serves job " + b.config.job + ", but " + a.path + " job " + a.config.job,
                   "set the same job in both"});
  }
  if (!HasAgent(a.config.role) || !HasAgent(b.config.role)) return;
  if (std::none_of(a.config.transports.begin(), a.config.transports.end(),
                   [&](const std::string& name) { return Names(b.config, name.c_str()); })) {
    out.push_back({"transports", b.path,
                   "has " + Joined(b.config.transports) + ", but " + a.path + " " +
                       Joined(a.config.transports) + ": they cannot send each other anything",
                   "name one transport in both; tcp works everywhere"});
  }
}

}  // namespace

Findings CheckConfigs(const std::vector<NamedConfig>& configs) {
  Findings out;
  for (const NamedConfig& named : configs) {
    CheckListening(named, out);
    CheckGpu(named, out);
    const Config& config = named.config;
    if (HasCoordinator(config.role) && config.state_dir.empty() && config.etcd.empty()) {
      out.push_back({"state_dir", named.path,
                     "commits are kept in memory: once the coordinator is started again it knows "
                     "no version and fences every engine",
                     "set state_dir to a directory on a disk that outlives the process, or etcd"});
    }
  }
  for (size_t a = 0; a < configs.size(); ++a) {
    for (size_t b = a + 1; b < configs.size(); ++b) CheckBetween(configs[a], configs[b], out);
  }
  return out;
}

Findings CheckHost(const NamedConfig& named, const HostFacts& host) {
  Findings out;
  const Config& config = named.config;
  const uint64_t slots = config.slots_in_pool * config.slot_bytes;
  const uint64_t of_agent =
      kOpenFilesOfAgent + kPeersExpected * (Names(config, "tcp") ? config.tcp_connections : 1);
  const uint64_t files = std::max(HasAgent(config.role) ? of_agent : 0,
                                  HasCoordinator(config.role) ? kOpenFilesOfCoordinator : 0);
  if (host.open_files_max < files) {
    out.push_back({"open_files", named.path,
                   "a process may open " + std::to_string(host.open_files_max) +
                       " files here; this role may need " + std::to_string(files),
                   "raise it: ulimit -n " + std::to_string(files) +
                       ", LimitNOFILE= of systemd, or the container's runtime"});
  }
  if (!HasAgent(config.role)) return out;
  const uint64_t stage = config.stage_bytes_max != 0 ? config.stage_bytes_max : host.ram_bytes / 2;
  if (stage + slots > host.memory_bytes) {
    out.push_back({"memory", named.path,
                   "stages may take " + Bytes(stage) + " and slots " + Bytes(slots) +
                       ", but this process may use " + Bytes(host.memory_bytes) +
                       ": it would be killed before it could refuse a stage",
                   "set stage_bytes_max to what the memory limit leaves, or raise the limit"});
  }
  if (!Names(config, "ucx")) return out;
  if (host.locked_bytes_max < slots) {
    out.push_back(
        {"locked_memory", named.path,
         "ucx registers " + Bytes(slots) + " of slots with network devices, but " +
             Bytes(host.locked_bytes_max) + " may be locked here",
         "raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or IPC_LOCK for the pod"});
  }
  if (host.shm_bytes < kShmOfUcx) {
    out.push_back(
        {"dev_shm", named.path,
         "ucx keeps queues between processes of a host in /dev/shm, which has " +
             Bytes(host.shm_bytes),
         "mount it with " + Bytes(kShmOfUcx) + " or more (a Memory emptyDir, --shm-size)"});
  }
  return out;
}

Findings CheckAgainst(const NamedConfig& named, const v1::StatusResponse& status) {
  Findings out;
  const Config& config = named.config;
  if (config.job != status.job()) {
    out.push_back({"job", named.path,
                   "serves job " + config.job + ", but the coordinator job " + status.job() +
                       ": it will not be admitted",
                   "set job to " + status.job() + ", or join the coordinator of " + config.job});
  }
  if (!HasAgent(config.role)) return out;
  int64_t largest = 0;
  uint64_t stages = 0;
  const uint64_t buffers = config.retain_versions + 1;
  for (const auto& p : status.participants()) {
    if (p.role() != v1::GROUP_ROLE_ENGINE) continue;
    largest = std::max(largest, p.bytes());
    if (p.agent_name() == config.name) stages += buffers * static_cast<uint64_t>(p.bytes());
  }
  const uint64_t limit = config.peer_rate_limit != 0 ? config.peer_rate_limit : config.rate_limit;
  const double seconds = limit == 0 ? 0 : static_cast<double>(largest) / static_cast<double>(limit);
  if (seconds * 1e3 > config.transfer_deadline_ms) {
    out.push_back({"rate_limit", named.path,
                   "the largest engine rank has " + BytesText(largest) + ", which take " +
                       SecondsText(seconds) +
                       " at the rate limit, longer than the deadline of a "
                       "transfer: every version will be aborted",
                   "raise rate_limit and peer_rate_limit, or transfer_deadline_ms"});
  }
  if (config.stage_bytes_max != 0 && stages > config.stage_bytes_max) {
    out.push_back({"stage_bytes_max", named.path,
                   std::to_string(buffers) + " buffers of this agent's engine ranks take " +
                       Bytes(stages) + " of " + Bytes(config.stage_bytes_max),
                   "raise stage_bytes_max, lower retain_versions, or let engines keep one buffer "
                   "(docs/vllm.md)"});
  }
  return out;
}

}  // namespace weightwire::cli
