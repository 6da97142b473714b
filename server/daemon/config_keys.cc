// The table of settings: everything that help, file, environment and flags know comes from here.
#include <algorithm>
#include <charconv>
#include <limits>
#include <sstream>

#include "server/base/edit_distance.h"
#include "server/daemon/config.h"
#include "server/daemon/listen_address.h"

namespace weightwire::daemon {
namespace {

Status Invalid(std::string message) {
  return Status(Code::kInvalidArgument, Reason::kConfigInvalid, std::move(message));
}

Key Text(std::string name, std::string value_name, std::string help, std::string Config::*field) {
  return {std::move(name), std::move(value_name), std::move(help),
          [field](Config& config, std::string_view value) {
            config.*field = std::string(value);
            return OkStatus();
          },
          [field](const Config& config) { return config.*field; }};
}

template <typename Number>
Key Numeric(std::string name, std::string value_name, std::string help, Number Config::*field,
            Number min, Number max) {
  return {std::move(name), std::move(value_name), std::move(help),
          [field, min, max](Config& config, std::string_view value) {
            Number number{};
            const auto [end, error] =
                std::from_chars(value.data(), value.data() + value.size(), number);
            if (error != std::errc() || end != value.data() + value.size() || number < min ||
                number > max) {
              return Invalid('"' + std::string(value) + "\" is no number from " +
                             std::to_string(min) + " to " + std::to_string(max));
            }
            config.*field = number;
            return OkStatus();
          },
          [field](const Config& config) { return std::to_string(config.*field); }};
}

/// "8388608", "8MiB", "10GB"; nothing when it is none, or too large.
std::optional<uint64_t> ParseBytes(std::string_view text) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit = text.substr(static_cast<size_t>(end - text.data()));
  if (error != std::errc()) return std::nullopt;
  if (unit.empty()) return number;
  const size_t power = std::string_view("kMGT").find(unit.front() == 'K' ? 'k' : unit.front());
  unit.remove_prefix(1);
  const bool binary = unit == "iB";
  if (power == std::string_view::npos || !(binary || unit == "B")) return std::nullopt;
  for (size_t i = 0; i <= power; ++i) {
    if (__builtin_mul_overflow(number, binary ? 1'024 : 1'000, &number)) return std::nullopt;
  }
  return number;
}

Key Bytes(std::string name, std::string help, uint64_t Config::*field, uint64_t min, uint64_t max) {
  Key key = Numeric<uint64_t>(std::move(name), "BYTES", std::move(help), field, min, max);
  key.set = [field, min, max](Config& config, std::string_view value) {
    const std::optional<uint64_t> number = ParseBytes(value);
    if (!number || *number < min || *number > max) {
      return Invalid('"' + std::string(value) + "\" is no number of bytes from " +
                     std::to_string(min) + " to " + std::to_string(max) +
                     ", such as 8388608, 8MiB or 10GB");
    }
    config.*field = *number;
    return OkStatus();
  };
  return key;
}

Key Millis(std::string name, std::string help, uint32_t Config::*field) {
  return Numeric<uint32_t>(std::move(name), "MS", std::move(help), field, 10, 3'600'000);
}

/// A listener's or peer's address; empty is allowed where `optional`.
Key Address(std::string name, std::string help, std::string Config::*field, bool optional) {
  Key key = Text(std::move(name), "HOST:PORT", std::move(help), field);
  key.set = [field, optional](Config& config, std::string_view value) {
    if (!(optional && value.empty())) {
      if (auto parsed = ParseHostPort(value); !parsed) return parsed.error();
    }
    config.*field = std::string(value);
    return OkStatus();
  };
  return key;
}

std::vector<std::string> Items(std::string_view value) {
  std::vector<std::string> items;
  std::istringstream in{std::string(value)};
  for (std::string item; std::getline(in, item, ',');) {
    item.erase(std::remove(item.begin(), item.end(), ' '), item.end());
    items.push_back(std::move(item));
  }
  return items;
}

std::string Joined(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : ",") + item;
  return out;
}

Key Addresses(std::string name, std::string help, std::vector<std::string> Config::*field) {
  return {std::move(name), "HOST:PORT,…", std::move(help),
          [field](Config& config, std::string_view value) {
            std::vector<std::string> items = Items(value);
            for (const std::string& item : items) {
              if (auto parsed = ParseHostPort(item); !parsed) return parsed.error();
            }
            config.*field = std::move(items);
            return OkStatus();
          },
          [field](const Config& config) { return Joined(config.*field); }};
}

/// "all, coordinator or agent"
template <typename Enum>
std::string OneOf(const std::vector<std::pair<std::string, Enum>>& choices) {
  std::string text;
  for (size_t i = 0; i < choices.size(); ++i) {
    text += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i].first;
  }
  return text;
}

template <typename Enum>
Key Choice(std::string name, std::string help, Enum Config::*field,
           std::vector<std::pair<std::string, Enum>> choices) {
  std::string names;
  for (const auto& [text, value] : choices) names += (names.empty() ? "" : "|") + text;
  return {std::move(name), names, std::move(help),
          [field, choices](Config& config, std::string_view value) {
            for (const auto& [text, choice] : choices) {
              if (text == value) {
                config.*field = choice;
                return OkStatus();
              }
            }
            return Invalid("must be " + OneOf(choices) + ", not \"" + std::string(value) + '"');
          },
          [field, choices](const Config& config) {
            for (const auto& [text, choice] : choices) {
              if (choice == config.*field) return text;
            }
            return std::string();
          }};
}

constexpr uint32_t kIdMax = UINT32_MAX - 1;  // the last number means nobody

Result<uint32_t> ParseId(const std::string& text) {
  uint32_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (error == std::errc() && end == text.data() + text.size() && id <= kIdMax) return id;
  return Fail(Invalid('"' + text + "\" is no number from 0 to " + std::to_string(kIdMax) +
                      "; `id -u NAME` prints a user's, `getent group NAME` a group's"));
}

Key AllowUids() {
  return {"allow_uids", "LIST",
          "users, by number, whose processes may attach besides this one's own (docs/security.md)",
          [](Config& config, std::string_view value) {
            std::vector<uint32_t> list;
            for (const std::string& item : Items(value)) {
              WW_ASSIGN_OR_STATUS(const uint32_t id, ParseId(item));
              if (std::find(list.begin(), list.end(), id) == list.end()) list.push_back(id);
            }
            config.allow_uids = std::move(list);
            return OkStatus();
          },
          [](const Config& config) {
            std::vector<std::string> items;
            for (const uint32_t id : config.allow_uids) items.push_back(std::to_string(id));
            return Joined(items);
          }};
}

Key SocketGroup() {
  return {"socket_group", "GID",
          "with allow_uids: only its members reach agent_socket; empty: every user, to be refused",
          [](Config& config, std::string_view value) {
            config.socket_group.reset();
            if (value.empty()) return OkStatus();
            WW_ASSIGN_OR_STATUS(config.socket_group, ParseId(std::string(value)));
            return OkStatus();
          },
          [](const Config& config) {
            return config.socket_group ? std::to_string(*config.socket_group) : std::string();
          }};
}

Key Transports() {
  return {
      "transports", "LIST",
      "data transports in order of preference (cuda_ipc, shm, nccl, ucx, tcp)",
      [](Config& config, std::string_view value) {
        std::vector<std::string> list;
        for (std::string& item : Items(value)) {
          static constexpr std::string_view kNames[] = {"cuda_ipc", "shm", "nccl", "ucx", "tcp"};
          if (std::ranges::find(kNames, item) == std::end(kNames)) {
            return Invalid("\"" + item +
                           "\" is no transport; cuda_ipc, shm, nccl, ucx and tcp are");
          }
          if (std::find(list.begin(), list.end(), item) != list.end()) {
            return Invalid(item + " is named twice");
          }
          list.push_back(std::move(item));
        }
        if (list.empty()) return Invalid("at least one transport is needed");
        config.transports = std::move(list);
        return OkStatus();
      },
      [](const Config& config) { return Joined(config.transports); }};
}

Key Plaintext() {
  return {"allow_plaintext", "LIST",
          "listeners beyond loopback that may be plaintext beside TLS (http, data)",
          [](Config& config, std::string_view value) {
            std::vector<std::string> list;
            for (std::string& item : Items(value)) {
              if (item != "http" && item != "data") {
                return Invalid("\"" + item + "\" is no such listener; http and data are");
              }
              list.push_back(std::move(item));
            }
            config.allow_plaintext = std::move(list);
            return OkStatus();
          },
          [](const Config& config) { return Joined(config.allow_plaintext); }};
}

std::vector<Key> MakeKeys() {
  constexpr uint64_t kTiB = uint64_t{1} << 40;
  return {
      Choice<Role>(
          "role", "what this process is", &Config::role,
          {{"all", Role::kAll}, {"coordinator", Role::kCoordinator}, {"agent", Role::kAgent}}),
      Text("job", "NAME", "job that it serves; letters, digits, '.', '_', '-'", &Config::job),
      Text("name", "NAME", "name for people (default: the host's)", &Config::name),
      Address("listen", "coordinator's gRPC listener; port 0: any", &Config::listen, false),
      Address("http", "metrics, health and status page; empty: none", &Config::http, true),
      Text("agent_socket", "PATH",
           "agent's Unix socket, in a directory of mode 0700 (0711 or 0710 with allow_uids)",
           &Config::agent_socket),
      AllowUids(),
      SocketGroup(),
      Addresses("coordinator", "coordinator to join (role agent); of several the one that leads",
                &Config::coordinator),
      Address("data_listen", "data plane listener (tcp)", &Config::data_listen, false),
      Address("ucx_listen", "data plane listener of ucx", &Config::ucx_listen, false),
      Address("nccl_listen", "data plane listener of nccl", &Config::nccl_listen, false),
      Text("nccl_library", "FILE",
           "NCCL, 2.18 or newer; empty: libnccl.so.2, as the loader finds it",
           &Config::nccl_library),
      Millis("nccl_form_timeout_ms",
             "for a communicator of nccl to form; after it, the next transport",
             &Config::nccl_form_timeout_ms),
      Text("ucx_tls", "LIST", "UCX_TLS of ucx: rc,tcp,…; empty: the environment's or UCX's choice",
           &Config::ucx_tls),
      Text("ucx_devices", "LIST",
           "UCX_NET_DEVICES of ucx: mlx5_0:1,…; empty: the environment's, or those near the GPUs",
           &Config::ucx_devices),
      Choice<transport::GpuDirect>(
          "gpu_direct", "weights between GPU memory and network without a copy in host memory",
          &Config::gpu_direct,
          {{"auto", transport::GpuDirect::kAuto},
           {"required", transport::GpuDirect::kRequired},
           {"off", transport::GpuDirect::kOff}}),
      Text("advertise_host", "HOST", "host that peers are told for the data plane",
           &Config::advertise_host),
      Transports(),
      Choice<bool>("transport_failover",
                   "after a failure, read from that peer over its next transport for a minute",
                   &Config::transport_failover, {{"false", false}, {"true", true}}),
      Text("state_dir", "DIR", "directory of the journal; empty: in memory, lost at exit",
           &Config::state_dir),
      Addresses("etcd", "keep the journal in etcd instead; of several coordinators one leads",
                &Config::etcd),
      Text("etcd_ca", "FILE", "whose certificates etcd may show (PEM): TLS; empty: plaintext",
           &Config::etcd_ca),
      Text("etcd_cert", "FILE", "shown to etcd (PEM), which may take its CN for the user",
           &Config::etcd_cert),
      Text("etcd_key", "FILE", "its private key (PEM, PKCS#8)", &Config::etcd_key),
      Text("etcd_server_name", "NAME", "name in etcd's certificate; empty: the host in etcd",
           &Config::etcd_server_name),
      Text("etcd_user", "NAME", "user of etcd", &Config::etcd_user),
      Text("etcd_password_file", "FILE", "its password", &Config::etcd_password_file),
      Millis("heartbeat_ms", "an agent's heartbeat", &Config::heartbeat_ms),
      Millis("lease_ms", "silence after which the places of an agent's ranks are free",
             &Config::lease_ms),
      Choice<coordinator::Fanout>(
          "fanout", "how engines of one layout get their bytes: chain and tree, they pass them on",
          &Config::fanout,
          {{"auto", coordinator::Fanout::kAuto},
           {"star", coordinator::Fanout::kStar},
           {"chain", coordinator::Fanout::kChain},
           {"tree", coordinator::Fanout::kTree}}),
      Millis("prepare_deadline_ms", "limit of the phase preparing", &Config::prepare_deadline_ms),
      Millis("transfer_deadline_ms", "limit of the phase transferring",
             &Config::transfer_deadline_ms),
      Millis("staged_deadline_ms", "wait for a manual commit", &Config::staged_deadline_ms),
      Millis("room_deadline_ms", "for an engine rank with one buffer to give up what it serves",
             &Config::room_deadline_ms),
      Numeric<uint32_t>("stale_after_ms", "MS",
                        "an engine that has had no coordinator for so long is fenced; 0: never",
                        &Config::stale_after_ms, 0, 7 * 86'400'000),
      Millis("commit_deadline_ms", "limit of the phase committing", &Config::commit_deadline_ms),
      Millis("abort_deadline_ms", "limit of the phase aborting", &Config::abort_deadline_ms),
      Numeric<uint32_t>("min_engines", "N", "complete engines that a publish waits for",
                        &Config::min_engines, 0, 16'384),
      Choice<coordinator::CommitPolicy::Kind>(
          "commit_policy", "engines that a version waits for; who is left out is filled afterwards",
          &Config::commit_policy,
          {{"all", coordinator::CommitPolicy::Kind::kAll},
           {"quorum", coordinator::CommitPolicy::Kind::kQuorum},
           {"deadline", coordinator::CommitPolicy::Kind::kDeadline}}),
      Numeric<uint32_t>("commit_quorum", "N", "engines that commit_policy quorum asks for",
                        &Config::commit_quorum, 0, 16'384),
      Millis("laggard_grace_ms", "for the others, once a quorum is staged",
             &Config::laggard_grace_ms),
      Choice<bool>("rollback_refused",
                   "go back to the version before when an engine refuses one (a canary)",
                   &Config::rollback_refused, {{"false", false}, {"true", true}}),
      Numeric<uint32_t>("attempts_max", "N",
                        "failed epochs of one version; a lost engine or connection is none",
                        &Config::attempts_max, 1, 100),
      Numeric<uint32_t>("verify_every", "N",
                        "after every N-th version, sum and compare what engines serve; 0: never",
                        &Config::verify_every, 0, 1'000'000),
      Numeric<uint32_t>("members_max", "N", "processes that may register", &Config::members_max, 1,
                        1'000'000),
      Numeric<uint32_t>("worker_threads", "N", "threads that pack and plan; 0: cores, at most 4",
                        &Config::worker_threads, 0, 256),
      Bytes("rate_limit", "a second, sent and as many read, by transports other than shm; 0: none",
            &Config::rate_limit, 0, uint64_t{1} << 40),
      Bytes("peer_rate_limit", "the same with any one peer agent", &Config::peer_rate_limit, 0,
            uint64_t{1} << 40),
      Numeric<uint32_t>("traffic_class", "N", "IP TOS byte of tcp data sockets (DSCP x 4); 0: none",
                        &Config::traffic_class, 0, 255),
      Choice<transport::Integrity>(
          "integrity",
          "of tcp data: sums against accidents, a MAC of each frame, or TLS 1.3; alike on all",
          &Config::integrity,
          {{"crc", transport::Integrity::kCrc},
           {"mac", transport::Integrity::kMac},
           {"tls", transport::Integrity::kTls}}),
      Numeric<uint32_t>("tcp_connections", "N",
                        "sockets of one tcp data session; on one host no more than tcp_io_threads",
                        &Config::tcp_connections, 1, 16),
      Numeric<uint32_t>("tcp_io_threads", "N", "threads that serve tcp data sockets",
                        &Config::tcp_io_threads, 1, 64),
      Bytes("segment_bytes_max", "most bytes under one sum", &Config::segment_bytes_max, 4'096,
            uint64_t{1} << 30),
      Bytes("slot_bytes", "one slot; a multiple of 4096", &Config::slot_bytes, 8'192,
            uint64_t{1} << 32),
      Numeric<uint32_t>("slots_in_pool", "N", "slots of this process", &Config::slots_in_pool, 1,
                        65'536),
      Numeric<uint32_t>("window", "N", "slots announced ahead, of one rank's streams together",
                        &Config::window, 1, 1'024),
      Bytes("chunk_bytes", "most bytes of one read", &Config::chunk_bytes, 4'096,
            uint64_t{1} << 26),
      Numeric<uint32_t>("gets_in_flight", "N", "reads under way, of one rank's streams together",
                        &Config::gets_in_flight, 1, 256),
      Millis("progress_timeout_ms", "a stream without progress for this long fails",
             &Config::progress_timeout_ms),
      Bytes("stage_bytes_max",
            "budget of stages and snapshots; 0: half of RAM, or of the cgroup's limit",
            &Config::stage_bytes_max, 0, 1'024 * kTiB),
      Choice<transfer::DeltaPolicy::Mode>(
          "delta",
          "send only what changed since earlier versions: auto, over a network or a rate limit and "
          "while it pays; always, wherever memory is not mapped; keeps a copy of what was sent",
          &Config::delta,
          {{"auto", transfer::DeltaPolicy::Mode::kAuto},
           {"always", transfer::DeltaPolicy::Mode::kAlways},
           {"off", transfer::DeltaPolicy::Mode::kOff}}),
      Text("delta_folder", "FOLDER",
           "where that copy lies, as files without a name; empty: in memory, of stage_bytes_max",
           &Config::delta_folder),
      Numeric<uint32_t>("delta_chain_max", "N",
                        "versions that an engine may have missed and still needs only changes",
                        &Config::delta_chain_max, 1, 64),
      Choice<Gpu>(
          "gpu",
          "lend GPU memory to ranks that ask for it: auto, host memory where there is none; "
          "required, refuse (untested on hardware)",
          &Config::gpu, {{"off", Gpu::kOff}, {"auto", Gpu::kAuto}, {"required", Gpu::kRequired}}),
      Bytes("gpu_slab_bytes", "taken of each visible GPU at the start, and lent to ranks",
            &Config::gpu_slab_bytes, 0, 1'024 * kTiB),
      Text("gpu_library", "FILE", "libweightwire_cuda.so; empty: beside weightwired",
           &Config::gpu_library),
      Numeric<uint32_t>("retain_versions", "N",
                        "versions that an engine rank holds beside the one it serves, for "
                        "rollbacks; each takes a buffer of the rank's size",
                        &Config::retain_versions, 1, memory::kBuffersMax - 1),
      Text("log_level", "LEVEL", "trace, debug, info, warn or error", &Config::log_level),
      Choice<LogFormat>(
          "log_format", "how logs are written to stderr; auto: as text on a terminal, else as JSON",
          &Config::log_format,
          {{"auto", LogFormat::kAuto}, {"json", LogFormat::kJson}, {"text", LogFormat::kText}}),
      Text("tls_cert", "FILE", "own certificate chain (PEM); with tls_key and tls_ca gRPC is mTLS",
           &Config::tls_cert),
      Text("tls_key", "FILE", "its private key (PEM, PKCS#8)", &Config::tls_key),
      Text("tls_ca", "FILE", "whose certificates are believed (PEM)", &Config::tls_ca),
      Text("tls_server_name", "NAME",
           "name in the coordinator's certificate; empty: the host in coordinator",
           &Config::tls_server_name),
      Text("token_file", "FILE",
           "role agent: job token, with tls_ca, instead of tls_cert and tls_key",
           &Config::token_file),
      Text("token_key", "FILE", "coordinator: take job tokens that are signed with its keys",
           &Config::token_key),
      Choice<bool>("http_tls",
                   "pages over TLS with tls_cert; but for probes, for certificates of the job",
                   &Config::http_tls, {{"false", false}, {"true", true}}),
      Plaintext(),
      Choice<bool>("insecure", "allow plaintext listeners beyond loopback", &Config::insecure,
                   {{"false", false}, {"true", true}}),
      Bytes("message_bytes_max", "largest gRPC message", &Config::message_bytes_max, 4'096,
            uint64_t{1} << 29),
  };
}

}  // namespace

const std::vector<Key>& Keys() {
  static const std::vector<Key> keys = MakeKeys();
  return keys;
}

const Key* FindKey(std::string_view name) {
  for (const Key& key : Keys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

const Key& NearestKey(std::string_view name) {
  return *std::min_element(Keys().begin(), Keys().end(), [&](const Key& a, const Key& b) {
    return EditDistance(a.name, name) < EditDistance(b.name, name);
  });
}

}  // namespace weightwire::daemon
