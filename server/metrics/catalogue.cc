// Every family that this build feeds, with the label values that are known from the start: those
// series are scraped as 0 before their first event. docs/metrics.md says what each one means.
#include <string>

#include "server/metrics/metrics.h"

namespace weightwire::metrics {
namespace {

std::vector<Labels> Values(const char* label, std::vector<std::string> values) {
  std::vector<Labels> out;
  for (std::string& value : values) out.push_back({{label, std::move(value)}});
  return out;
}

const std::vector<double> kSeconds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                      0.5,   1,      2.5,   5,    10,    30,   60,  120};
const std::vector<double> kShortSeconds = {
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 5};

void DeclareEpochs(Sink& sink) {
  sink.DeclareCounter("epochs_total", "Epochs that ended, by outcome.",
                      Values("outcome", {"committed", "aborted", "filled", "fill_aborted"}));
  sink.DeclareCounter("epoch_aborts_total", "Aborted epochs, by reason.", {});
  sink.DeclareHistogram(
      "epoch_phase_seconds", "Time that epochs spent in a phase.", kSeconds,
      Values("phase", {"preparing", "transferring", "staged", "committing", "aborting"}));
  sink.DeclareHistogram("epoch_duration_seconds", "From the first Prepare to the end of the epoch.",
                        kSeconds);
  sink.DeclareGauge("epoch_committed", "Number of the last committed epoch.");
  sink.DeclareGauge("version_committed", "Version of the last committed epoch.");
  sink.DeclareGauge(
      "epoch_inflight", "Epochs under way, by phase.",
      Values("state", {"preparing", "transferring", "staged", "committing", "aborting"}));
  sink.DeclareGauge("epoch_inflight_seconds", "Age of the epoch under way, by phase.", {});
  sink.DeclareGauge("epoch_last_commit_timestamp_seconds", "Unix time of the last commit.");
}

void DeclareMembers(Sink& sink) {
  const auto roles = Values("role", {"trainer", "engine"});
  sink.DeclareGauge("members", "Registered processes, by role and state.", {});
  sink.DeclareGauge("agents", "Agents with a session.");
  sink.DeclareCounter("registrations_total", "Registrations, by role and result.", {});
  sink.DeclareCounter("lease_expiries_total", "Processes lost because a lease expired.", roles);
  sink.DeclareCounter("fenced_requests_total", "Requests refused for a stale caller.", {});
  sink.DeclareCounter("layout_rejections_total", "Layouts refused, by reason.", {});
  sink.DeclareGauge("leader", "1 while this coordinator decides.");
  sink.DeclareCounter("leader_changes_total", "Times that this process began or ceased to decide.");
}

void DeclareEngines(Sink& sink) {
  sink.DeclareGauge("engines", "Engines, by state.",
                    Values("state", {"incomplete", "empty", "filling", "serving", "staged",
                                     "installing", "dirty"}));
  sink.DeclareGauge("engine_epoch_active", "Epoch that an engine serves.", {});
  sink.DeclareGauge("engine_epoch_lag", "Versions that an engine is behind.", {});
  sink.DeclareGauge("engine_lag_versions_max", "Most versions that an engine is behind.");
  sink.DeclareHistogram("engine_pause_seconds", "Time that engines took to swap.", kShortSeconds);
  sink.DeclareCounter("engine_catchups_total", "Fills, by result.",
                      Values("result", {"ok", "aborted"}));
}

void DeclarePlans(Sink& sink) {
  sink.DeclareGauge("plan_bytes", "Bytes that the last plan moves.");
  sink.DeclareGauge("plan_copies", "Copies of the last plan.");
  sink.DeclareHistogram("plan_seconds", "Time to make a plan.", kSeconds);
  sink.DeclareCounter("plan_cache_hits_total", "Plans that were at hand.");
}

void DeclareTransfers(Sink& sink) {
  const auto transports = Values("transport", {"shm", "tcp"});
  std::vector<Labels> directions;
  for (const char* transport : {"shm", "tcp"}) {
    for (const char* direction : {"in", "out"}) {
      directions.push_back({{"transport", transport}, {"direction", direction}});
    }
  }
  sink.DeclareCounter("transfer_bytes_total", "Payload moved.", directions);
  sink.DeclareHistogram("transfer_seconds", "From the command to the last verified byte.", kSeconds,
                        transports);
  sink.DeclareCounter("transfers_started_total", "Transfers of target ranks begun.");
  sink.DeclareCounter("transfers_finished_total", "Transfers of target ranks ended, by result.",
                      Values("result", {"ok"}));
  sink.DeclareCounter("transfer_retries_total", "Segments read again, by cause.",
                      Values("cause", {"digest_mismatch"}));
  sink.DeclareCounter("transport_fallbacks_total",
                      "Peers reached by another transport than the "
                      "first choice.",
                      {});
  sink.DeclareCounter("transport_closes_total", "Data sessions that closed, by cause.", {});
  sink.DeclareCounter("digest_failures_total", "Segments whose bytes did not match their sum.",
                      transports);
  sink.DeclareGauge("staging_bytes", "Memory of stages and snapshots.");
  sink.DeclareGauge("registered_memory_bytes", "Memory mapped for transfers, stages included.");
}

void DeclareSafety(Sink& sink) {
  sink.DeclareCounter("epoch_mix_detected_total", "Engines found serving two epochs at once.");
  sink.DeclareCounter("invariant_violations_total", "Violated invariants of the epoch protocol.",
                      Values("id", {"I1", "I2", "I3", "I4", "I6"}));
}

void DeclareService(Sink& sink) {
  sink.DeclareCounter("rpc_started_total", "Calls begun, by method.", {});
  sink.DeclareCounter("rpc_handled_total", "Calls ended, by method and code.", {});
  sink.DeclareHistogram("rpc_seconds", "Time to answer, by method.", kShortSeconds, {});
  sink.DeclareCounter("accept_errors_total", "Connections that could not be accepted.",
                      Values("errno", {"emfile", "enfile", "memory", "econnaborted", "other"}));
  sink.DeclareCounter("connections_shed_total", "Connections closed because descriptors run out.");
  sink.DeclareCounter("auth_failures_total", "Callers refused, by reason.",
                      Values("reason", {"uid", "ticket"}));
  sink.DeclareGauge("insecure_mode", "1 while plaintext beyond loopback is allowed.");
  sink.DeclareHistogram("journal_fsync_seconds", "Time of one durable append.", kShortSeconds);
  sink.DeclareGauge("journal_bytes", "Bytes of the records in the journal.");
  sink.DeclareGauge("journal_recovery_seconds", "Time to read the journal at start.");
  sink.DeclareGauge("build_info", "1, with the version as a label.", {});
  sink.DeclareGauge("open_fds", "Open file descriptors.");
  sink.DeclareGauge("max_fds", "Limit of open file descriptors.");
}

}  // namespace

void DeclareAll(Sink& sink) {
  DeclareEpochs(sink);
  DeclareMembers(sink);
  DeclareEngines(sink);
  DeclarePlans(sink);
  DeclareTransfers(sink);
  DeclareSafety(sink);
  DeclareService(sink);
}

}  // namespace weightwire::metrics
