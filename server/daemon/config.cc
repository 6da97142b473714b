#include "server/daemon/config.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <thread>

#include "server/daemon/listen_address.h"

namespace weightwire::daemon {
namespace {

constexpr uint64_t kSlotOverhead = 128;  // plan/segments.h: sums and padding of a one-segment slot
constexpr size_t kSocketPathMax = 104;   // room for ".fd" within a Unix socket's 107 bytes

Status Invalid(const std::string& message) {
  return Status(Code::kInvalidArgument, Reason::kConfigInvalid, message);
}

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 && name[0] != '\0' ? name : "host";
}

/// What depends on the machine and was not set.
void FillIn(Config& config) {
  if (config.name.empty()) config.name = HostName();
  if (config.agent_socket.empty()) config.agent_socket = DefaultAgentSocket();
  if (config.worker_threads == 0) {
    config.worker_threads = std::clamp(std::thread::hardware_concurrency(), 1u, 4u);
  }
}

bool IsId(const std::string& text) {
  return !text.empty() && text.size() <= 128 &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) || c == '.' || c == '_' || c == '-';
         });
}

Status CheckSizes(const Config& config) {
  if (config.slot_bytes % 4096 != 0) return Invalid("slot_bytes must be a multiple of 4096");
  if (config.slot_bytes < config.segment_bytes_max + kSlotOverhead) {
    return Invalid("slot_bytes must be at least segment_bytes_max + 128");
  }
  if ((config.gpu == Gpu::kOff) != (config.gpu_slab_bytes == 0)) {
    return Invalid("gpu_slab_bytes is set, to 1 or more, with gpu auto or required and only then");
  }
  const bool quorum = config.commit_policy == coordinator::CommitPolicy::Kind::kQuorum;
  if (quorum != (config.commit_quorum > 0)) {
    return Invalid("commit_quorum is set, to 1 or more, with commit_policy quorum and only then");
  }
  if (config.lease_ms < 2 * config.heartbeat_ms) {
    return Invalid("lease_ms must be at least twice heartbeat_ms");
  }
  return OkStatus();
}

bool Names(const Config& config, std::string_view transport) {
  const auto& names = config.transports;
  return std::find(names.begin(), names.end(), transport) != names.end();
}

Status CheckTransports(const Config& config) {
  for (const std::string name : {"cuda_ipc", "nccl"}) {
    if (!HasAgent(config.role) || !Names(config, name) || config.gpu != Gpu::kOff) continue;
    return Status(Invalid("transports names " + name + ", and gpu is off"))
        .Remedy("set gpu to auto or required, with gpu_slab_bytes, or leave " + name + " out");
  }
  if (config.gpu_direct != transport::GpuDirect::kRequired || !HasAgent(config.role) ||
      Names(config, "ucx") || Names(config, "nccl")) {
    return OkStatus();
  }
  return Status(Invalid("gpu_direct is required, but transports names neither ucx nor nccl"))
      .Remedy("add one of them to transports, or set gpu_direct to auto or off");
}

Status CheckIntegrity(const Config& config) {
  using transport::Integrity;
  if (config.integrity == Integrity::kCrc || !HasAgent(config.role)) return OkStatus();
  const bool tls = config.integrity == Integrity::kTls;
  const std::string set = tls ? "integrity is tls" : "integrity is mac";
  for (const std::string name : {"ucx", "nccl"}) {
    if (!Names(config, name)) continue;
    return Status(Invalid(set + ", and " + name + ", which transports names, carries no " +
                          (tls ? "TLS" : "MAC")))
        .Remedy("leave " + name + " out of transports, or set integrity to crc");
  }
  if (tls && config.tls_cert.empty()) {
    return Status(Invalid(set + ", and there is no certificate to show"))
        .Remedy("set tls_cert, tls_key and tls_ca, or integrity to crc");
  }
  if (!config.tls_ca.empty()) return OkStatus();
  return Status(
             Invalid(set + ", and the tickets that its keys are made of would come in plaintext"))
      .Remedy("set tls_cert, tls_key and tls_ca, or token_file and tls_ca, or integrity to crc");
}

Status CheckNames(const Config& config) {
  if (!IsId(config.job)) {
    return Invalid("job must be 1 to 128 letters, digits, '.', '_' or '-'");
  }
  if (HasAgent(config.role) && config.agent_socket.size() > kSocketPathMax) {
    return Invalid("agent_socket must have at most 104 bytes");
  }
  if (config.socket_group && config.allow_uids.empty()) {
    return Status(Invalid("socket_group is for the users of allow_uids, and that is empty"))
        .Remedy("set allow_uids, or leave socket_group out");
  }
  if (config.role == Role::kAgent && config.coordinator.empty()) {
    return Status(Invalid("role agent needs the address of a coordinator"))
        .Remedy("set coordinator, or run with role all");
  }
  if (!config.etcd.empty() && config.role != Role::kCoordinator) {
    return Status(Invalid("etcd is for role coordinator: one that loses the lead ends its process"))
        .Remedy("run agents in processes of their own (role agent)");
  }
  if (!config.etcd.empty() && !config.state_dir.empty()) {
    return Invalid("etcd and state_dir are two places for one journal: set one of them");
  }
  static const std::vector<std::string> kLevels = {"trace", "debug", "info", "warn", "error"};
  if (std::find(kLevels.begin(), kLevels.end(), config.log_level) == kLevels.end()) {
    return Invalid("log_level must be trace, debug, info, warn or error, not \"" +
                   config.log_level + '"');
  }
  return OkStatus();
}

Status CheckTls(const Config& config) {
  if (!config.token_file.empty()) {
    if (HasCoordinator(config.role)) {
      return Invalid("token_file is for role agent: a coordinator has a certificate");
    }
    if (!config.tls_cert.empty() || !config.tls_key.empty()) {
      return Invalid("token_file stands in for tls_cert and tls_key: set the one or the others");
    }
    if (!config.tls_ca.empty()) return OkStatus();
    return Status(Invalid("token_file needs tls_ca: a token is shown over TLS only"))
        .Remedy("name the CA of the coordinator's certificate");
  }
  if (!config.token_key.empty() && config.tls_cert.empty()) {
    return Status(Invalid("token_key needs TLS: tokens are taken over TLS only"))
        .Remedy("set tls_cert, tls_key and tls_ca");
  }
  const bool all = !config.tls_cert.empty() && !config.tls_key.empty() && !config.tls_ca.empty();
  const bool none = config.tls_cert.empty() && config.tls_key.empty() && config.tls_ca.empty();
  if (config.http_tls && config.tls_cert.empty()) {
    return Status(Invalid("http_tls needs a certificate"))
        .Remedy("set tls_cert, tls_key and tls_ca");
  }
  if (all || none) return OkStatus();
  return Invalid("tls_cert, tls_key and tls_ca belong together: set all three or none");
}

Status CheckEtcd(const Config& config) {
  const std::pair<const char*, const std::string&> settings[] = {
      {"etcd_ca", config.etcd_ca},     {"etcd_cert", config.etcd_cert},
      {"etcd_key", config.etcd_key},   {"etcd_server_name", config.etcd_server_name},
      {"etcd_user", config.etcd_user}, {"etcd_password_file", config.etcd_password_file}};
  for (const auto& [name, value] : settings) {
    if (config.etcd.empty() && !value.empty()) {
      return Status(Invalid(std::string(name) + " is set, and etcd is not"))
          .Remedy("name the members in etcd");
    }
  }
  if (config.etcd_cert.empty() != config.etcd_key.empty()) {
    return Invalid("etcd_cert and etcd_key belong together: set both or none");
  }
  if (config.etcd_user.empty() != config.etcd_password_file.empty()) {
    return Invalid("etcd_user and etcd_password_file belong together: set both or none");
  }
  if (!config.etcd_ca.empty()) return OkStatus();
  if (!config.etcd_cert.empty() || !config.etcd_server_name.empty()) {
    return Status(Invalid("etcd_cert and etcd_server_name are for TLS, and etcd_ca is not set"))
        .Remedy("set etcd_ca to the CA of etcd's certificates");
  }
  if (config.etcd_user.empty() || config.insecure) return OkStatus();
  for (const std::string& endpoint : config.etcd) {
    WW_ASSIGN_OR_STATUS(const HostPort parsed, ParseHostPort(endpoint));
    if (IsLoopback(parsed.host)) continue;
    return Status(Invalid("the password of etcd_user would go to " + endpoint + " in plaintext"))
        .Remedy("set etcd_ca, or accept the risk with --insecure");
  }
  return OkStatus();
}

/// `kind` is what allow_plaintext calls the listener; empty: it speaks TLS where files are given.
Status CheckListener(const Config& config, const char* key, const std::string& address,
                     const std::string& kind) {
  if (config.insecure || address.empty()) return OkStatus();
  WW_ASSIGN_OR_STATUS(HostPort parsed, ParseHostPort(address));
  if (IsLoopback(parsed.host)) return OkStatus();
  const auto& allowed = config.allow_plaintext;
  if (kind.empty() ? !config.tls_cert.empty()
                   : std::find(allowed.begin(), allowed.end(), kind) != allowed.end()) {
    return OkStatus();
  }
  return Status(Code::kFailedPrecondition, Reason::kInsecureListener,
                std::string(key) + ": " + address +
                    " can be reached from other hosts, and it is plaintext")
      .Remedy(kind.empty() ? "set tls_cert, tls_key and tls_ca, listen on loopback, or accept the "
                             "risk with --insecure"
                           : "listen on loopback, or accept the risk with allow_plaintext: " +
                                 kind + " or --insecure");
}

Status CheckListeners(const Config& config) {
  if (HasCoordinator(config.role)) {
    WW_RETURN_IF_ERROR(CheckListener(config, "listen", config.listen, ""));
  }
  if (HasAgent(config.role)) {
    const bool tls = config.integrity == transport::Integrity::kTls;
    WW_RETURN_IF_ERROR(CheckListener(config, "data_listen", config.data_listen, tls ? "" : "data"));
    if (Names(config, "ucx")) {
      WW_RETURN_IF_ERROR(CheckListener(config, "ucx_listen", config.ucx_listen, "data"));
    }
    if (Names(config, "nccl")) {
      WW_RETURN_IF_ERROR(CheckListener(config, "nccl_listen", config.nccl_listen, "data"));
    }
  }
  return CheckListener(config, "http", config.http, config.http_tls ? "" : "http");
}

}  // namespace

Result<Config> MakeConfig(const std::vector<std::pair<std::string, Values>>& layers) {
  Config config;
  for (const auto& [layer, values] : layers) {
    for (const auto& [name, value] : values) {
      const Key* key = FindKey(name);
      WW_CHECK(key != nullptr);
      if (Status status = key->set(config, value); !status.ok()) {
        return Fail(Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                           name + " (from the " + layer + "): " + status.message())
                        .Remedy(status.remedy()));
      }
    }
  }
  FillIn(config);
  WW_FAIL_IF_ERROR(CheckNames(config));
  WW_FAIL_IF_ERROR(CheckSizes(config));
  WW_FAIL_IF_ERROR(CheckTransports(config));
  WW_FAIL_IF_ERROR(CheckTls(config));
  WW_FAIL_IF_ERROR(CheckEtcd(config));
  WW_FAIL_IF_ERROR(CheckIntegrity(config));
  WW_FAIL_IF_ERROR(CheckListeners(config));
  return config;
}

std::string DefaultAgentSocket() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string base = runtime != nullptr && runtime[0] != '\0' ? runtime : "/tmp";
  return base + "/weightwire-" + std::to_string(getuid()) + "/agent.sock";
}

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kAll:
      return "all";
    case Role::kCoordinator:
      return "coordinator";
    case Role::kAgent:
      return "agent";
  }
  return "invalid";
}

int ExitCodeOf(const Status& status) {
  return status.ok() ? 0 : 64 + static_cast<int>(status.reason());
}

}  // namespace weightwire::daemon
