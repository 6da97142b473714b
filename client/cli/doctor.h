#pragma once

#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/daemon/config.h"
#include "server/tls/tls_files.h"
#include "weightwire/v1/coordinator.pb.h"

/// `wwctl doctor`: what is wrong with configurations, this host or a running job, and how to mend
/// it. It changes nothing: no file, no directory, no listener stays.
namespace weightwire::cli {

struct Finding {
  std::string check;   ///< which one found it: "state_dir"
  std::string where;   ///< the file, rank, engine or address that it is about
  std::string what;    ///< what is wrong
  std::string remedy;  ///< what to do
};
using Findings = std::vector<Finding>;

/// A configuration as weightwired would take it from `path` and the environment.
struct NamedConfig {
  std::string path;
  daemon::Config config;
};

/// What the host of a process gives it.
struct HostFacts {
  uint64_t open_files_max = 0;
  uint64_t locked_bytes_max = 0;
  uint64_t ram_bytes = 0;
  uint64_t memory_bytes = 0;  ///< the least of RAM and the control group's limit
  uint64_t shm_bytes = 0;     ///< size of /dev/shm; 0: there is none
};
HostFacts ReadHostFacts();

// ---- pure ----
/// Each configuration on its own, and what does not fit between them.
Findings CheckConfigs(const std::vector<NamedConfig>& configs);
Findings CheckHost(const NamedConfig& config, const HostFacts& host);
/// A running job: what its status shows. `now_unix_seconds` by this host's clock.
Findings CheckService(const v1::StatusResponse& status, double now_unix_seconds);
/// A configuration against the job that it is to join.
Findings CheckAgainst(const NamedConfig& config, const v1::StatusResponse& status);

// ---- looks at this host ----
/// Directories and ports that the configuration names.
Findings CheckPlaces(const NamedConfig& config);
/// The agent's socket by the environment, as the processes of a job find it; "": not set.
std::string AgentSocketHere();
/// Whether this user may attach to the agent that listens there. "" is fine.
Findings CheckAgentSocket(const std::string& path);

struct DoctorRequest {
  std::vector<std::string> config_paths;
  std::string address;  ///< of the coordinator
  bool address_set =
      false;  ///< by flag or environment: then it is asked beside configurations, too
  double timeout_seconds = 4;  ///< for all coordinators together: a doctor answers soon
  tls::TlsFiles files;         ///< for `address`
};
/// With configurations: these, this host, and the coordinators that agents are to join; a
/// coordinator's own configuration is checked as before its start. Without: the coordinator at
/// `address` and this host's limits.
Findings Diagnose(const DoctorRequest& request);
/// Of many findings of one check it shows the first ones and sums up the others, unless `all`.
std::string FindingsText(const Findings& findings, bool all);
/// {"findings": [{check, where, what, remedy}]}
std::string FindingsJson(const Findings& findings);

}  // namespace weightwire::cli
