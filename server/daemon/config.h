#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/status.h"
#include "server/coordinator/commit_policy.h"
#include "server/coordinator/fanout.h"
#include "server/memory/stage_store.h"
#include "server/tls/tls_files.h"
#include "server/transfer/delta_policy.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/ucx/ucx_transport.h"

/// The one validated configuration of weightwired. Precedence: flag > environment > file > default.
namespace weightwire::daemon {

enum class Role : int { kAll = 1, kCoordinator = 2, kAgent = 3 };
enum class LogFormat : int { kAuto = 0, kJson = 1, kText = 2 };
enum class Gpu : int { kOff = 1, kAuto = 2, kRequired = 3 };

struct Config {
  Role role = Role::kAll;
  std::string job = "default";
  std::string name;  ///< default: the host's name
  std::string listen = "127.0.0.1:7411";
  std::string http = "127.0.0.1:7412";
  std::string agent_socket;
  std::vector<uint32_t> allow_uids;      ///< who may attach besides the own user
  std::optional<uint32_t> socket_group;  ///< with allow_uids: who may reach the socket
  std::vector<std::string> coordinator;  ///< role agent: tried in turn
  std::string data_listen = "127.0.0.1:0";
  std::string ucx_listen = "127.0.0.1:0";
  std::string nccl_listen = "127.0.0.1:0";
  std::string nccl_library;
  uint32_t nccl_form_timeout_ms = 20'000;
  std::string ucx_tls;
  std::string ucx_devices;
  transport::GpuDirect gpu_direct = transport::GpuDirect::kAuto;
  std::string advertise_host;
  std::vector<std::string> transports = {"shm", "tcp"};
  bool transport_failover = true;
  std::string state_dir;
  std::vector<std::string> etcd;  ///< endpoints; several coordinators, of which one leads
  std::string etcd_ca;            ///< whose certificates etcd may show; empty: plaintext
  std::string etcd_cert;          ///< shown to etcd
  std::string etcd_key;
  std::string etcd_server_name;
  std::string etcd_user;
  std::string etcd_password_file;

  uint32_t heartbeat_ms = 1'000;
  uint32_t lease_ms = 5'000;
  coordinator::Fanout fanout = coordinator::Fanout::kAuto;
  uint32_t prepare_deadline_ms = 30'000;
  uint32_t transfer_deadline_ms = 120'000;
  uint32_t staged_deadline_ms = 60'000;
  uint32_t room_deadline_ms = 20'000;
  uint32_t stale_after_ms = 0;  ///< 0: never
  uint32_t commit_deadline_ms = 30'000;
  uint32_t abort_deadline_ms = 10'000;
  uint32_t min_engines = 1;
  coordinator::CommitPolicy::Kind commit_policy = coordinator::CommitPolicy::Kind::kAll;
  uint32_t commit_quorum = 0;  ///< commit_policy quorum
  uint32_t laggard_grace_ms = 2'000;
  bool rollback_refused = true;
  uint32_t attempts_max = 3;
  uint32_t members_max = 16'384;
  uint32_t verify_every = 0;

  uint32_t worker_threads = 0;  ///< 0: one per core, at most 4
  uint64_t rate_limit = 0;
  uint64_t peer_rate_limit = 0;
  uint32_t traffic_class = 0;
  transport::Integrity integrity = transport::Integrity::kCrc;
  uint32_t tcp_connections = 4;
  uint32_t tcp_io_threads = 2;
  uint64_t segment_bytes_max = 1 << 20;
  uint64_t slot_bytes = 8 << 20;
  uint32_t slots_in_pool = 16;
  uint32_t window = 8;
  uint64_t chunk_bytes = 4 << 20;
  uint32_t gets_in_flight = 16;
  uint32_t progress_timeout_ms = 30'000;
  uint64_t stage_bytes_max = 0;
  transfer::DeltaPolicy::Mode delta = transfer::DeltaPolicy::Mode::kAuto;
  std::string delta_folder;
  uint32_t delta_chain_max = 4;
  Gpu gpu = Gpu::kOff;
  uint64_t gpu_slab_bytes = 0;
  std::string gpu_library;
  uint32_t retain_versions = memory::kBuffersUsual - 1;

  std::string log_level = "info";
  LogFormat log_format = LogFormat::kAuto;
  std::string tls_cert;
  std::string tls_key;
  std::string tls_ca;
  std::string tls_server_name;  ///< role agent: of the coordinator's certificate
  std::string token_file;       ///< role agent: instead of tls_cert and tls_key
  std::string token_key;        ///< of the coordinator; empty: it takes no tokens
  bool http_tls = false;
  std::vector<std::string> allow_plaintext;
  bool insecure = false;
  uint64_t message_bytes_max = 16 << 20;

  friend bool operator==(const Config&, const Config&) = default;
};
inline tls::TlsFiles TlsFilesOf(const Config& config) {
  return {config.tls_cert, config.tls_key, config.tls_ca, config.tls_server_name,
          config.token_file};
}

/// One setting: `key` in the file, WEIGHTWIRE_<KEY> in the environment, `--key` (with dashes) as a
/// flag. `set` checks the value on its own: kInvalidArgument / kConfigInvalid.
struct Key {
  std::string name;
  std::string value_name;  ///< for help: "HOST:PORT", "MS", "BYTES"
  std::string help;
  std::function<Status(Config&, std::string_view)> set;
  std::function<std::string(const Config&)> get;
};
const std::vector<Key>& Keys();
/// nullptr when there is none.
const Key* FindKey(std::string_view name);
/// The key that `name` was probably meant to be.
const Key& NearestKey(std::string_view name);

using Values = std::map<std::string, std::string>;
/// The settings of a YAML file: a flat map of scalars, or lists of scalars joined by commas.
///   kInvalidArgument / kConfigInvalid  not readable, not YAML, or an unknown key (names the
///   nearest)
Result<Values> ValuesFromYaml(const std::string& path);
/// The settings among the environment variables, read by `lookup` ("WEIGHTWIRE_LISTEN" → value).
Values ValuesFromEnvironment(
    const std::function<std::optional<std::string>(const std::string&)>& lookup);

/// Defaults overlaid by `layers` in order (the last one wins), then checked as a whole.
///   kInvalidArgument / kConfigInvalid         names the key and the layer
///   kFailedPrecondition / kInsecureListener   a plaintext listener beyond loopback that is not
///                                             allowed
Result<Config> MakeConfig(const std::vector<std::pair<std::string, Values>>& layers);
/// Every setting as a YAML file that MakeConfig turns into `config` again.
std::string ToYaml(const Config& config);

/// "${XDG_RUNTIME_DIR:-/tmp}/weightwire-$UID/agent.sock"
std::string DefaultAgentSocket();

std::string_view RoleName(Role role);
inline bool HasCoordinator(Role role) { return role != Role::kAgent; }
inline bool HasAgent(Role role) { return role != Role::kCoordinator; }

/// Exit code of weightwired and wwctl for a failure: 64 + Reason.
int ExitCodeOf(const Status& status);

}  // namespace weightwire::daemon
