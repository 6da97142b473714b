#include "server/agent/attempt.h"

#include <string>
#include <utility>

#include "server/agent/spans.h"

namespace weightwire::agent {
namespace {

std::vector<epoch::Digest> DigestsOf(const std::vector<transfer::StreamDigest>& streams) {
  std::vector<epoch::Digest> digests;
  digests.reserve(streams.size());
  for (const auto& stream : streams) digests.push_back({stream.plan, stream.stream, stream.digest});
  return digests;
}

template <typename Job>
Job JobOf(const Attempt& attempt, std::string name, transfer::Binding binding) {
  Job job;
  job.epoch = attempt.command.epoch;
  job.participant = attempt.command.member.id;
  job.name = std::move(name);
  job.binding = std::move(binding);
  return job;
}

/// Whoever it is that the bytes are for: only readers that the coordinator gave its tickets to.
transfer::SourceJob ServingJobOf(const Attempt& attempt, std::string name,
                                 transfer::Binding binding) {
  auto job = JobOf<transfer::SourceJob>(attempt, std::move(name), std::move(binding));
  transfer::Readers& readers = job.readers.emplace();
  for (const auto& [ticket, caller] : attempt.command.admitted) readers.callers.insert(caller);
  for (const epoch::Reader& reader : attempt.command.readers) {
    readers.ranks[reader.participant] = {reader.caller, reader.rank};
  }
  job.stall_limit = attempt.command.stall_limit;
  return job;
}

}  // namespace

transfer::SourceJob SourceJobOf(const Attempt& attempt, std::string name,
                                transfer::Binding binding) {
  auto job = ServingJobOf(attempt, std::move(name), std::move(binding));
  for (size_t assignment = 0; assignment < attempt.slices.size(); ++assignment) {
    job.assignments.push_back(
        {attempt.slices[assignment], attempt.command.assignments[assignment].readers});
  }
  job.drops_readers = attempt.command.drops_readers;
  return job;
}

transfer::TargetJob TargetJobOf(const Attempt& attempt, std::string name,
                                transfer::Binding binding) {
  auto job = JobOf<transfer::TargetJob>(attempt, std::move(name), std::move(binding));
  job.slice = attempt.slices.front();
  job.source_participants = attempt.command.source_participants;
  for (const auto& [rank, peer] : attempt.command.sources) {
    job.sources[rank] = {peer.agent, peer.incarnation, peer.host, peer.addresses, peer.ticket};
  }
  return job;
}

transfer::SourceJob RelayJobOf(const Attempt& attempt, std::string name, transfer::Binding binding,
                               std::shared_ptr<transfer::SlotBitmap> received) {
  auto job = ServingJobOf(attempt, std::move(name), std::move(binding));
  job.assignments.push_back({attempt.passed_on, attempt.command.relay_readers});
  job.received = std::move(received);
  return job;
}

epoch::Report TransferReportOf(const Attempt& attempt) {
  const epoch::PrepareCommand& command = attempt.command;
  if (command.role == epoch::Role::kSource) {
    return epoch::SourceDoneReport{
        command.epoch, command.member, DigestsOf(attempt.sourced->digests),
        WithParts(SpanOf("serve", attempt.started, attempt.ended), attempt.sourced->spans)};
  }
  const transfer::TargetReport& staged = *attempt.staged;
  epoch::StagedReport report;
  report.epoch = command.epoch;
  report.member = command.member;
  report.digests = DigestsOf(staged.digests);
  report.bytes = staged.bytes;
  report.bytes_by_transport = staged.bytes_by_transport;
  report.bytes_kept = staged.bytes_kept;
  report.delta = staged.delta;
  report.rereads = staged.rereads;
  report.seconds = std::chrono::duration<double>(attempt.ended - attempt.started).count();
  report.spans = WithParts(SpanOf("stage", attempt.started, attempt.ended), staged.spans);
  report.spans.front().bytes = staged.bytes;
  return report;
}

Status CheckSenders(const Attempt& attempt) {
  if (attempt.command.role != epoch::Role::kTarget) return OkStatus();
  for (const plan::Stream& stream : attempt.slices.front()->streams) {
    if (attempt.command.sources.contains(stream.source_rank) &&
        attempt.command.source_participants.contains(stream.source_rank)) {
      continue;
    }
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "the plan reads from source rank " + std::to_string(stream.source_rank) +
                      ", which the command does not name");
  }
  return OkStatus();
}

}  // namespace weightwire::agent
