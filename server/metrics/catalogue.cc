#include "server/base/status.h"
#include "server/metrics/metrics.h"

// One function for each area. Families whose labels are a closed set list it, so that every series
// is scraped as 0 before its first event; the others appear with their first event.
namespace weightwire::metrics {
namespace {

std::vector<Labels> Each(const std::string& label, const std::vector<std::string>& values) {
  std::vector<Labels> all;
  all.reserve(values.size());
  for (const std::string& value : values) all.push_back({{label, value}});
  return all;
}

std::vector<Labels> Pairs(const std::string& a, const std::vector<std::string>& as,
                          const std::string& b, const std::vector<std::string>& bs) {
  std::vector<Labels> all;
  for (const std::string& x : as) {
    for (const std::string& y : bs) all.push_back({{a, x}, {b, y}});
  }
  return all;
}

std::vector<std::string> Reasons() {
  std::vector<std::string> names;
  for (int number = 1;; ++number) {
    const auto reason = ReasonFromNumber(number);
    if (!reason) return names;
    names.emplace_back(ReasonName(*reason));
  }
}

std::vector<std::string> Results() {
  std::vector<std::string> results = Reasons();
  results.insert(results.begin(), "ok");
  return results;
}

std::vector<std::string> Transports() { return {"shm", "cuda_ipc", "nccl", "ucx", "tcp"}; }

std::vector<double> Seconds() {
  return {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120};
}

void DeclareEpochs(Sink& sink) {
  sink.DeclareCounter("epochs_total", "Epochs, fills and rollbacks that ended, by outcome",
                      Each("outcome", {"committed", "aborted", "fill_committed", "fill_aborted",
                                       "rollback_committed", "rollback_aborted"}));
  sink.DeclareCounter("epoch_aborts_total", "Epochs and fills that were aborted, by reason",
                      Each("reason", Reasons()));
  sink.DeclareCounter("publishes_given_up_total",
                      "Versions that trainer ranks published and no engine got, by reason",
                      Each("reason", Reasons()));
  sink.DeclareHistogram(
      "epoch_phase_seconds", "Time that an epoch spent in a phase", Seconds(),
      Each("phase", {"preparing", "transferring", "staged", "committing", "aborting"}));
  sink.DeclareHistogram("epoch_duration_seconds", "Time from the start of an epoch to its end",
                        Seconds());
  sink.DeclareGauge("epoch_committed", "The last epoch whose COMMIT is durable");
  sink.DeclareGauge("version_committed", "The version that is committed; 0: none yet");
  sink.DeclareGauge("last_commit_timestamp_seconds",
                    "Unix time of the last commit by this process; 0: none since it started");
  sink.DeclareGauge(
      "waiting_seconds",
      "For so long everyone has waited for what `wwctl status` names; 0: for nothing, "
      "or for something without a beginning");
  sink.DeclareGauge("lineage",
                    "The newest lineage of versions that is committed; rises by 1 when a trainer "
                    "goes back to an earlier step");
  sink.DeclareCounter("engines_recalled_total",
                      "Complete engines that brought along what they held when a coordinator was "
                      "lost, by outcome",
                      Each("outcome", {"kept", "refused"}));
  sink.DeclareCounter("invariant_violations_total",
                      "Times that an invariant was found broken; must stay 0",
                      Each("id", {"I1", "I2", "I4"}));
}

void DeclareMembers(Sink& sink) {
  const std::vector<std::string> roles = {"trainer", "engine"};
  sink.DeclareGauge(
      "members",
      "Registered ranks, by role; ready ones have agreed on a layout, those that are cut "
      "off may resume",
      Pairs("role", roles, "state", {"registered", "ready", "cut_off"}));
  sink.DeclareCounter("engines_left_behind_total",
                      "Times that a version went on without an engine that was late or failed");
  sink.DeclareCounter("versions_refused_total",
                      "Committed versions that an engine refused (a canary), by what the fleet did",
                      Each("outcome", {"rolled_back", "no_holder", "kept"}));
  sink.DeclareGauge("engines_not_ready",
                    "Complete engines that serve nothing, or not what is committed; without "
                    "drained ones");
  sink.DeclareGauge("engines_installing",
                    "Engines that are to change to a committed version and have not said that they "
                    "did");
  sink.DeclareGauge(
      "engine_ready",
      "1 for an engine that serves what is committed, or is about to change to it; of "
      "engines with a process here that are not drained, at most 256, those that are "
      "not ready first",
      {});
  sink.DeclareGauge("engine_version",
                    "The version that an engine serves; 0: none. Of the engines of engine_ready",
                    {});
  sink.DeclareGauge(
      "engine_versions_behind",
      "Versions between what an engine serves and what is committed. Of the engines of "
      "engine_ready",
      {});
  sink.DeclareGauge("engines_unlisted", "Engines without a series in engine_ready");
  sink.DeclareGauge("engines_drained",
                    "Complete engines that an operator has drained: they take no part in versions");
  sink.DeclareGauge("versions_behind_max",
                    "Versions by which the engine that is furthest behind differs from what is "
                    "committed; `wwctl engines` names it");
  sink.DeclareCounter("engines_forgotten_total",
                      "Engines that left and are not in the status any more");
  sink.DeclareCounter("registrations_total", "Registrations of ranks, by role and result",
                      Pairs("role", roles, "result", Results()));
  sink.DeclareCounter("lease_expiries_total",
                      "Ranks whose lease ended: they may resume while nobody else has their place",
                      Each("role", roles));
  sink.DeclareCounter("members_resumed_total",
                      "Ranks that came back as the same process after they were cut off",
                      Each("role", roles));
  sink.DeclareCounter(
      "fenced_requests_total", "Requests and reports that were too old to count",
      Each("cause", {"stale_incarnation", "stale_epoch", "stale_session", "wrong_agent"}));
  sink.DeclareCounter("layout_rejections_total", "Layouts that were refused, by reason",
                      Each("reason", Reasons()));
}

void DeclarePlans(Sink& sink) {
  sink.DeclareHistogram("plan_seconds", "Time to build and prove a plan", Seconds());
  sink.DeclareGauge("plan_copies", "Copies in the plan that was built last");
  sink.DeclareGauge("plan_bytes", "Bytes in the plan that was built last");
  sink.DeclareCounter("plan_cache_hits_total", "Plans that were known already");
}

void DeclareContent(Sink& sink) {
  sink.DeclareCounter("content_verifications_total",
                      "Times that what engines serve was summed and compared, by outcome; "
                      "`wwctl verify` says what differs",
                      Each("outcome", {"equal", "different", "incomplete"}));
  sink.DeclareHistogram("content_verification_seconds",
                        "Time from the question to the answer of a verification", Seconds());
}

void DeclareTransfers(Sink& sink) {
  const std::vector<std::string> transports = Transports();
  sink.DeclareCounter("transfer_bytes_total", "Payload bytes moved",
                      Pairs("transport", transports, "direction", {"in", "out"}));
  std::vector<Labels> of_gpus;
  for (const char* path : {"direct", "staged"}) {
    for (Labels& labels : Pairs("transport", transports, "direction", {"in", "out"})) {
      labels.emplace_back("path", path);
      of_gpus.push_back(std::move(labels));
    }
  }
  sink.DeclareCounter("gpu_transfer_bytes_total",
                      "Payload bytes of ranks on a GPU, moved without mapping, by path: direct, or "
                      "staged in host memory",
                      std::move(of_gpus));
  sink.DeclareCounter("transfer_bytes_kept_total",
                      "Payload bytes that were not read because the target had them already");
  sink.DeclareCounter("transfer_bytes_delta_total",
                      "Payload bytes that were made of what changed since earlier versions: made, "
                      "and the bytes of code that were read for them",
                      Each("kind", {"made", "code"}));
  sink.DeclareCounter("delta_elements_total",
                      "Elements that were made of what changed, and those of them that changed",
                      Each("kind", {"all", "changed"}));
  sink.DeclareCounter("delta_mismatches_total",
                      "Segments that came out with another sum, and were read as they are",
                      Each("transport", transports));
  sink.DeclareHistogram("transfer_seconds", "Time of one rank's transfer", Seconds(),
                        Each("transport", transports));
  sink.DeclareCounter("transfers_started_total", "Transfers of a rank that were started");
  sink.DeclareCounter("transfers_finished_total", "Transfers of a rank that ended, by result",
                      Each("result", Results()));
  sink.DeclareCounter("readers_detached_total",
                      "Readers that held up others for too long and were left behind (quorum)");
  sink.DeclareCounter("transfer_retries_total", "Parts of a transfer that were tried again",
                      Each("cause", {"digest_mismatch", "transport_failed"}));
  sink.DeclareCounter("transport_failovers_total",
                      "Streams read over another transport than the preferred one, which failed",
                      Pairs("from", transports, "to", transports));
  sink.DeclareCounter("digest_failures_total", "Segments whose bytes differed from their sum",
                      Each("transport", transports));
  sink.DeclareCounter("rate_limited_seconds_total",
                      "Time that slots and Gets waited for rate_limit or peer_rate_limit",
                      Each("direction", {"in", "out"}));
  sink.DeclareGauge("staging_bytes", "Memory held by stages, snapshots and slots");
  sink.DeclareGauge("registered_memory_bytes", "Application memory that is bound");
}

void DeclareService(Sink& sink) {
  sink.DeclareGauge("connections", "Open data-plane connections, by transport and state",
                    Pairs("transport", Transports(), "state", {"handshaking", "open"}));
  sink.DeclareCounter("transport_closes_total",
                      "Data-plane sessions that were refused or broke, by transport and cause", {});
  sink.DeclareGauge("ucx_devices",
                    "1 for each network device that ucx may use, by what chose it: setting, "
                    "environment, gpu (nearest to one), numa or ucx");
  sink.DeclareGauge("ucx_sessions",
                    "Sessions of ucx that passed their self-test, by the lanes that UCX chose");
  sink.DeclareGauge("ucx_self_test_bytes_per_second",
                    "Rate of 1 MiB in the last self-test, by the lanes that UCX chose");
  sink.DeclareCounter("ucx_self_tests_total", "Self-tests of new sessions of ucx, by result",
                      Each("result", {"passed", "wrong_bytes", "failed", "timeout"}));
  sink.DeclareCounter("connections_shed_total",
                      "Connections dropped because file descriptors ran short");
  sink.DeclareCounter("auth_failures_total",
                      "Connections, calls and frames of nobody who is known, by reason",
                      Each("reason", {"uid", "handshake", "identity", "ticket", "proof", "mac",
                                      "tls", "token", "page", "stream"}));
  sink.DeclareCounter(
      "authz_denied_total", "Calls refused because the caller's role has no right to them",
      // By method as they come; one of each role, so that the family is scraped.
      Pairs("role", {"trainer", "engine", "agent", "operator", "metrics", "coordinator"}, "method",
            {"unknown"}));
  sink.DeclareGauge("cert_expiry_timestamp_seconds",
                    "Unix time at which the own certificate expires; 0 without TLS");
  sink.DeclareCounter("accept_errors_total", "Connections that could not be accepted, by errno",
                      {});
  sink.DeclareCounter("rpc_started_total", "RPCs that began, by method", {});
  sink.DeclareCounter("rpc_handled_total", "RPCs that were answered, by method and code", {});
  sink.DeclareHistogram("rpc_seconds", "Time to answer a unary RPC, by method", Seconds(), {});
  sink.DeclareGauge("insecure_mode",
                    "1 while started with --insecure: plaintext listeners beyond loopback");
  sink.DeclareGauge("build_info", "1, with the version and the git revision as labels", {});
  sink.DeclareGauge("open_fds", "Open file descriptors of the process");
  sink.DeclareGauge("max_fds", "Most file descriptors that the process may open");
  sink.DeclareHistogram("journal_fsync_seconds", "Time to make one journal record durable",
                        Seconds());
  sink.DeclareGauge("leader", "1 while this coordinator leads its job, 0 on a standby");
  sink.DeclareGauge("journal_failing",
                    "1 while no decision can be made durable: the journal's disk is full, or its "
                    "storage failed");
  sink.DeclareGauge("journal_lost_decisions",
                    "1 when members serve what was committed and the journal did not have: it was "
                    "put back, or records were deleted");
  sink.DeclareGauge("journal_bytes", "Size of the records in the journal");
  sink.DeclareGauge("journal_recovery_seconds", "Time to open and read the journal at start");
}

}  // namespace

void DeclareAll(Sink& sink) {
  DeclareEpochs(sink);
  DeclareMembers(sink);
  DeclarePlans(sink);
  DeclareContent(sink);
  DeclareTransfers(sink);
  DeclareService(sink);
}

}  // namespace weightwire::metrics
