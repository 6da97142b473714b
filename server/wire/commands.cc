// Commands down and reports up.
#include <string>
#include <utility>

#include "server/wire/checks.h"
#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"

namespace weightwire::wire {
namespace {

template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

Result<Epoch> EpochFromProto(std::string_view field, uint64_t number) {
  if (number == 0) return Fail(Bad(field, "must not be 0"));
  return Epoch(number);
}

Result<epoch::Kind> KindFromProto(std::string_view field, v1::EpochKind kind) {
  if (kind == v1::EPOCH_KIND_PUBLISH) return epoch::Kind::kPublish;
  if (kind == v1::EPOCH_KIND_FILL) return epoch::Kind::kFill;
  if (kind == v1::EPOCH_KIND_ROLLBACK) return epoch::Kind::kRollback;
  return Fail(UnknownEnum(field, kind));
}

Result<epoch::Role> RoleFromProto(std::string_view field, v1::MemberRole role) {
  if (role == v1::MEMBER_ROLE_SOURCE) return epoch::Role::kSource;
  if (role == v1::MEMBER_ROLE_TARGET) return epoch::Role::kTarget;
  return Fail(UnknownEnum(field, role));
}

void SetPeer(const epoch::PeerAddress& peer, v1::PeerAddress* out) {
  out->set_agent(peer.agent.value);
  out->set_incarnation(peer.incarnation.value);
  out->set_host(peer.host);
  out->mutable_addresses()->insert(peer.addresses.begin(), peer.addresses.end());
  out->set_ticket(TicketToProto(peer.ticket));
}

Result<epoch::PeerAddress> PeerFromProto(std::string_view field, const v1::PeerAddress& peer) {
  epoch::PeerAddress out;
  const std::string path(field);
  if (peer.agent() == 0 || peer.incarnation() == 0) {
    return Fail(Bad(field, "needs an agent and an incarnation"));
  }
  if (peer.as_told()) return Fail(Bad(field, "leaves off what nobody filled in"));
  WW_FAIL_IF_ERROR(CheckText(path + ".host", peer.host(), kAddressBytesMax));
  WW_ASSIGN(out.addresses, AddressesFromProto(path + ".addresses", peer.addresses()));
  WW_ASSIGN(out.ticket, TicketFromProto(path + ".ticket", peer.ticket()));
  out.agent = AgentId(peer.agent());
  out.incarnation = Incarnation(peer.incarnation());
  out.host = peer.host();
  return out;
}

void SetPrepare(const epoch::PrepareCommand& command, v1::Prepare* out) {
  out->set_epoch(command.epoch.value);
  out->set_kind(static_cast<v1::EpochKind>(command.kind));
  out->set_version(command.version.value);
  out->set_content(command.content.value);
  out->set_held(command.held.value);
  *out->mutable_member() = ToProto(command.member);
  out->set_role(static_cast<v1::MemberRole>(command.role));
  for (const epoch::PlanAssignment& assignment : command.assignments) {
    v1::Leg* to = out->add_legs();
    *to->mutable_plan() = ToProto(assignment.plan);
    to->set_rank(assignment.rank);
    to->set_readers(assignment.readers);
  }
  for (const auto& [rank, peer] : command.sources) SetPeer(peer, &(*out->mutable_sources())[rank]);
  for (const auto& [rank, participant] : command.source_participants) {
    (*out->mutable_source_participants())[rank] = participant.value;
  }
  std::map<Incarnation, uint32_t> callers;
  for (const auto& [ticket, caller] : command.admitted) {
    callers.emplace(caller, out->admitted_size());
    v1::Prepare::Admitted* to = out->add_admitted();
    to->set_ticket(TicketToProto(ticket));
    to->set_caller(caller.value);
  }
  for (const epoch::Reader& reader : command.readers) {
    v1::Prepare::Reader* to = out->add_readers();
    to->set_participant(reader.participant.value);
    to->set_rank(reader.rank);
    to->set_admitted(callers.at(reader.caller));
  }
  out->set_relayed(command.relayed);
  out->set_relay_readers(command.relay_readers);
  out->set_stall_ms(MillisOf(command.stall_limit));
  out->set_lineage(command.lineage);
  out->set_trace_id(TraceIdToProto(command.trace_id));
  out->set_drops_readers(command.drops_readers);
}

Status PeersFromProto(const v1::Prepare& prepare, epoch::PrepareCommand* out) {
  WW_RETURN_IF_ERROR(CheckCount("prepare.sources", prepare.sources_size(), kRanksMax));
  WW_RETURN_IF_ERROR(
      CheckCount("prepare.source_participants", prepare.source_participants_size(), kRanksMax));
  WW_RETURN_IF_ERROR(CheckCount("prepare.admitted", prepare.admitted_size(), kSliceStreamsMax));
  for (const auto& [rank, peer] : prepare.sources()) {
    WW_ASSIGN_OR_STATUS(out->sources[rank], PeerFromProto("prepare.sources", peer));
  }
  for (const auto& [rank, participant] : prepare.source_participants()) {
    if (participant == 0) return Bad("prepare.source_participants", "must not be 0");
    out->source_participants[rank] = ParticipantId(participant);
  }
  for (const v1::Prepare::Admitted& admitted : prepare.admitted()) {
    WW_ASSIGN_OR_STATUS(Ticket ticket,
                        TicketFromProto("prepare.admitted.ticket", admitted.ticket()));
    if (admitted.caller() == 0) return Bad("prepare.admitted.caller", "must not be 0");
    out->admitted.emplace_back(ticket, Incarnation(admitted.caller()));
  }
  WW_RETURN_IF_ERROR(CheckCount("prepare.readers", prepare.readers_size(), kSliceStreamsMax));
  for (const v1::Prepare::Reader& reader : prepare.readers()) {
    if (reader.participant() == 0) return Bad("prepare.readers.participant", "must not be 0");
    if (reader.admitted() >= out->admitted.size()) {
      return Bad("prepare.readers.admitted", "names no ticket");
    }
    out->readers.push_back({ParticipantId(reader.participant()), reader.rank(),
                            out->admitted[reader.admitted()].second});
  }
  return OkStatus();
}

Result<epoch::Command> PrepareFromProto(const v1::Prepare& prepare) {
  epoch::PrepareCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("prepare.epoch", prepare.epoch()));
  WW_ASSIGN(out.content, EpochFromProto("prepare.content", prepare.content()));
  WW_ASSIGN(out.kind, KindFromProto("prepare.kind", prepare.kind()));
  WW_ASSIGN(out.member, FromProto("prepare.member", prepare.member()));
  WW_ASSIGN(out.role, RoleFromProto("prepare.role", prepare.role()));
  WW_ASSIGN(out.trace_id, TraceIdFromProto("prepare.trace_id", prepare.trace_id()));
  out.version = Version(prepare.version());
  out.held = Epoch(prepare.held());
  if ((out.held == Epoch{}) == (out.kind == epoch::Kind::kRollback)) {
    return Fail(Bad("prepare.held", "is an epoch in a rollback, and 0 else"));
  }
  out.relayed = prepare.relayed();
  out.relay_readers = prepare.relay_readers();
  if (out.relay_readers > kRanksMax) {
    return Fail(Bad("prepare.relay_readers", "is more than there can be ranks"));
  }
  out.stall_limit = std::chrono::milliseconds(prepare.stall_ms());
  out.lineage = prepare.lineage();
  out.drops_readers = prepare.drops_readers();
  WW_FAIL_IF_ERROR(CheckCount("prepare.legs", prepare.legs_size(), kLegsMax));
  for (const v1::Leg& assignment : prepare.legs()) {
    out.assignments.push_back(
        {FromProto(assignment.plan()), assignment.rank(), assignment.readers()});
  }
  WW_FAIL_IF_ERROR(PeersFromProto(prepare, &out));
  return out;
}

Result<epoch::Command> TransferFromProto(const v1::Transfer& transfer) {
  epoch::TransferCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("transfer.epoch", transfer.epoch()));
  WW_ASSIGN(out.member, FromProto("transfer.member", transfer.member()));
  return out;
}

Result<epoch::Command> ReleaseFromProto(const v1::Release& release) {
  epoch::ReleaseCommand out;
  out.epoch = Epoch(release.epoch());  // 0: given up before any attempt
  out.version = Version(release.version());
  WW_ASSIGN(out.member, FromProto("release.member", release.member()));
  WW_ASSIGN(out.why, FromProto("release.why", release.why()));
  return out;
}

Result<epoch::Command> CommitFromProto(const v1::Commit& commit) {
  epoch::CommitCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("commit.epoch", commit.epoch()));
  WW_ASSIGN(out.content, EpochFromProto("commit.content", commit.content()));
  WW_ASSIGN(out.member, FromProto("commit.member", commit.member()));
  out.version = Version(commit.version());
  out.leader = commit.leader();
  return out;
}

Result<epoch::Command> InstalledFromProto(const v1::Installed& installed) {
  epoch::CommittedEverywhereCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("installed.epoch", installed.epoch()));
  WW_ASSIGN(out.member, FromProto("installed.member", installed.member()));
  return out;
}

Result<epoch::Command> AbortFromProto(const v1::AbortEpoch& abort) {
  epoch::AbortCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("abort.epoch", abort.epoch()));
  WW_ASSIGN(out.member, FromProto("abort.member", abort.member()));
  WW_ASSIGN(out.why, FromProto("abort.why", abort.why()));
  return out;
}

Result<epoch::Command> EvictFromProto(const v1::Evicted& evicted) {
  epoch::EvictCommand out;
  WW_ASSIGN(out.member, FromProto("evicted.member", evicted.member()));
  WW_ASSIGN(out.why, FromProto("evicted.why", evicted.why()));
  return out;
}

Result<epoch::Command> BehindFromProto(const v1::Behind& behind) {
  epoch::StaleCommand out;
  WW_ASSIGN(out.committed, EpochFromProto("behind.committed", behind.committed()));
  WW_ASSIGN(out.member, FromProto("behind.member", behind.member()));
  return out;
}

Result<epoch::Command> AttestFromProto(const v1::Attest& attest) {
  epoch::HashCommand out;
  WW_ASSIGN(out.content, EpochFromProto("attest.content", attest.content()));
  WW_ASSIGN(out.member, FromProto("attest.member", attest.member()));
  out.verification = attest.verification();
  out.reading = FromProto(attest.reading());
  out.rank = attest.rank();
  return out;
}

Result<epoch::Command> ExcludeFromProto(const v1::Exclude& exclude) {
  epoch::ExcludeCommand out;
  WW_ASSIGN(out.epoch, EpochFromProto("exclude.epoch", exclude.epoch()));
  WW_ASSIGN(out.member, FromProto("exclude.member", exclude.member()));
  WW_FAIL_IF_ERROR(CheckCount("exclude.readers", exclude.readers_size(), kRanksMax));
  out.plan = FromProto(exclude.plan());
  for (const uint32_t reader : exclude.readers()) {
    if (reader == 0) return Fail(Bad("exclude.readers", "must not be 0"));
    out.readers.emplace_back(reader);
  }
  return out;
}

void SetAttested(const epoch::HashedReport& report, v1::ReportRequest::Attested* out) {
  out->set_verification(report.verification);
  *out->mutable_why() = OutcomeOf(report.why);
  out->set_seconds(report.seconds);
  out->mutable_sums()->Reserve(static_cast<int>(2 * report.sums.size()));
  for (const auto& sum : report.sums) {
    for (uint64_t lane : sum) out->add_sums(lane);
  }
}

Result<epoch::Report> AttestedFromProto(Epoch epoch, epoch::Member member,
                                        const v1::ReportRequest::Attested& attested) {
  epoch::HashedReport out{epoch, member, attested.verification(), {}, {}, attested.seconds()};
  WW_FAIL_IF_ERROR(CheckSeconds("attested.seconds", attested.seconds()));
  WW_ASSIGN(out.why, FromProto("attested.why", attested.why()));
  WW_FAIL_IF_ERROR(CheckCount("attested.sums", attested.sums_size(), kDigestsMax));
  if (attested.sums_size() % 2 != 0) {
    return Fail(Bad("attested.sums", "has half a sum"));
  }
  out.sums.reserve(static_cast<size_t>(attested.sums_size() / 2));
  for (int i = 0; i < attested.sums_size(); i += 2) {
    out.sums.push_back({attested.sums(i), attested.sums(i + 1)});
  }
  return out;
}

template <typename Repeated>
void SetDigests(const std::vector<epoch::Digest>& digests, Repeated* out) {
  for (const epoch::Digest& digest : digests) {
    v1::StreamDigest* to = out->Add();
    *to->mutable_plan() = ToProto(digest.plan);
    to->set_stream(digest.stream);
    to->set_digest(digest.digest);
  }
}

template <typename Repeated>
Result<std::vector<epoch::Digest>> DigestsFromProto(std::string_view field,
                                                    const Repeated& digests) {
  WW_FAIL_IF_ERROR(CheckCount(field, digests.size(), kDigestsMax));
  std::vector<epoch::Digest> out;
  out.reserve(digests.size());
  for (const v1::StreamDigest& digest : digests) {
    out.push_back({FromProto(digest.plan()), digest.stream(), digest.digest()});
  }
  return out;
}

void SetSpans(const std::vector<epoch::Span>& spans, v1::ReportRequest* out) {
  for (const epoch::Span& span : spans) {
    v1::Span* to = out->add_spans();
    to->set_name(span.name);
    to->set_begin_us(span.begin_us);
    to->set_duration_us(span.duration_us);
    to->set_bytes(span.bytes);
    to->set_source(span.source.value);
    to->set_transport(span.transport);
  }
}

Result<std::vector<epoch::Span>> SpansFromProto(const v1::ReportRequest& request) {
  WW_FAIL_IF_ERROR(
      CheckCount("spans", static_cast<size_t>(request.spans_size()), epoch::kSpansMax));
  std::vector<epoch::Span> out;
  for (const v1::Span& span : request.spans()) {
    WW_FAIL_IF_ERROR(CheckId("spans.name", span.name()));
    if (!span.transport().empty()) WW_FAIL_IF_ERROR(CheckId("spans.transport", span.transport()));
    // Sums and differences of times stay far from the ends of 64 bits.
    constexpr int64_t kMicrosMax = int64_t{1} << 60;
    if (span.begin_us() < 0 || span.begin_us() > kMicrosMax || span.duration_us() < 0 ||
        span.duration_us() > kMicrosMax || span.bytes() < 0) {
      return Fail(Bad("spans", "has a time or a size that cannot be"));
    }
    out.push_back({span.name(), span.begin_us(), span.duration_us(), span.bytes(),
                   ParticipantId(span.source()), span.transport()});
  }
  return out;
}

Result<epoch::Report> StagedFromProto(Epoch epoch, epoch::Member member,
                                      const v1::ReportRequest::Staged& staged) {
  epoch::StagedReport out{epoch,
                          member,
                          {},
                          staged.bytes(),
                          {},
                          staged.rereads(),
                          staged.seconds(),
                          staged.bytes_kept()};
  WW_ASSIGN(out.keeps,
            ContentsFromProto("staged.keeps",
                              {Epoch(staged.keeps_epoch()), Version(staged.keeps_version())},
                              staged.keeps_beyond()));
  out.delta = {staged.delta_bytes(), staged.delta_code_bytes(), staged.delta_elements(),
               staged.delta_changed()};
  WW_FAIL_IF_ERROR(CheckSeconds("staged.seconds", staged.seconds()));
  WW_ASSIGN(out.digests, DigestsFromProto("staged.digests", staged.digests()));
  WW_FAIL_IF_ERROR(
      CheckCount("staged.bytes_by_transport", staged.bytes_by_transport_size(), kAddressesMax));
  for (const auto& [transport, bytes] : staged.bytes_by_transport()) {
    WW_FAIL_IF_ERROR(CheckId("staged.bytes_by_transport key", transport));
    out.bytes_by_transport.emplace(transport, bytes);
  }
  return out;
}

Result<epoch::Report> BodyFromProto(Epoch epoch, epoch::Member member,
                                    const v1::ReportRequest& request) {
  switch (request.kind_case()) {
    case v1::ReportRequest::kPrepared: {
      epoch::PreparedReport out{epoch, member};
      WW_ASSIGN(out.holds, ContentsFromProto("prepared.holds", request.prepared().holds()));
      return out;
    }
    case v1::ReportRequest::kSourced: {
      epoch::SourceDoneReport out{epoch, member, {}};
      WW_ASSIGN(out.digests, DigestsFromProto("sourced.digests", request.sourced().digests()));
      return out;
    }
    case v1::ReportRequest::kStaged:
      return StagedFromProto(epoch, member, request.staged());
    case v1::ReportRequest::kApplied:
      WW_FAIL_IF_ERROR(CheckSeconds("applied.flip_seconds", request.applied().flip_seconds()));
      return epoch::SwappedReport{epoch, member, request.applied().flip_seconds()};
    case v1::ReportRequest::kDrained:
      return epoch::DrainedReport{epoch, member};
    case v1::ReportRequest::kFailed: {
      WW_ASSIGN(Status why, FromProto("failed.why", request.failed().why()));
      return epoch::FailedReport{epoch, member, std::move(why), request.failed().refused()};
    }
    case v1::ReportRequest::kLost: {
      WW_ASSIGN(Status why, FromProto("lost.why", request.lost().why()));
      return epoch::LostReport{member, std::move(why)};
    }
    case v1::ReportRequest::kAttested:
      return AttestedFromProto(epoch, member, request.attested());
    case v1::ReportRequest::KIND_NOT_SET:
      break;
  }
  return Fail(Bad("report", "of no known kind"));
}

void SetBody(const epoch::Report& report, v1::ReportRequest* out) {
  std::visit(
      [&](const auto& r) {
        if constexpr (requires { r.spans; }) SetSpans(r.spans, out);
      },
      report);
  std::visit(Overloaded{
                 [&](const epoch::PreparedReport& r) {
                   SetContents(r.holds, 0, out->mutable_prepared()->mutable_holds());
                 },
                 [&](const epoch::SourceDoneReport& r) {
                   SetDigests(r.digests, out->mutable_sourced()->mutable_digests());
                 },
                 [&](const epoch::StagedReport& r) {
                   v1::ReportRequest::Staged* to = out->mutable_staged();
                   SetDigests(r.digests, to->mutable_digests());
                   to->set_bytes(r.bytes);
                   to->mutable_bytes_by_transport()->insert(r.bytes_by_transport.begin(),
                                                            r.bytes_by_transport.end());
                   to->set_rereads(r.rereads);
                   to->set_seconds(r.seconds);
                   to->set_bytes_kept(r.bytes_kept);
                   to->set_delta_bytes(r.delta.bytes);
                   to->set_delta_code_bytes(r.delta.code_bytes);
                   to->set_delta_elements(r.delta.elements);
                   to->set_delta_changed(r.delta.changed);
                   if (!r.keeps.empty()) {
                     to->set_keeps_epoch(r.keeps.front().epoch.value);
                     to->set_keeps_version(r.keeps.front().version.value);
                   }
                   SetContents(r.keeps, 1, to->mutable_keeps_beyond());
                 },
                 [&](const epoch::SwappedReport& r) {
                   out->mutable_applied()->set_flip_seconds(r.flip_seconds);
                 },
                 [&](const epoch::DrainedReport&) { out->mutable_drained(); },
                 [&](const epoch::FailedReport& r) {
                   *out->mutable_failed()->mutable_why() = OutcomeOf(r.why);
                   out->mutable_failed()->set_refused(r.refused);
                 },
                 [&](const epoch::LostReport& r) {
                   *out->mutable_lost()->mutable_why() = OutcomeOf(r.why);
                 },
                 [&](const epoch::HashedReport& r) { SetAttested(r, out->mutable_attested()); },
             },
             report);
}

uint64_t EpochOf(const epoch::Report& report) {
  return std::visit(Overloaded{[](const epoch::LostReport&) { return uint64_t{0}; },
                               [](const auto& r) { return r.epoch.value; }},
                    report);
}

}  // namespace

v1::SessionDown ToProto(const epoch::Command& command) {
  v1::SessionDown out;
  std::visit(Overloaded{
                 [&](const epoch::PrepareCommand& c) { SetPrepare(c, out.mutable_prepare()); },
                 [&](const epoch::TransferCommand& c) {
                   out.mutable_transfer()->set_epoch(c.epoch.value);
                   *out.mutable_transfer()->mutable_member() = ToProto(c.member);
                 },
                 [&](const epoch::ReleaseCommand& c) {
                   v1::Release* to = out.mutable_release();
                   to->set_epoch(c.epoch.value);
                   to->set_version(c.version.value);
                   *to->mutable_member() = ToProto(c.member);
                   *to->mutable_why() = OutcomeOf(c.why);
                 },
                 [&](const epoch::CommitCommand& c) {
                   v1::Commit* to = out.mutable_commit();
                   to->set_epoch(c.epoch.value);
                   to->set_version(c.version.value);
                   to->set_content(c.content.value);
                   *to->mutable_member() = ToProto(c.member);
                   to->set_leader(c.leader);
                 },
                 [&](const epoch::CommittedEverywhereCommand& c) {
                   out.mutable_installed()->set_epoch(c.epoch.value);
                   *out.mutable_installed()->mutable_member() = ToProto(c.member);
                 },
                 [&](const epoch::AbortCommand& c) {
                   out.mutable_abort()->set_epoch(c.epoch.value);
                   *out.mutable_abort()->mutable_member() = ToProto(c.member);
                   *out.mutable_abort()->mutable_why() = OutcomeOf(c.why);
                 },
                 [&](const epoch::EvictCommand& c) {
                   *out.mutable_evicted()->mutable_member() = ToProto(c.member);
                   *out.mutable_evicted()->mutable_why() = OutcomeOf(c.why);
                 },
                 [&](const epoch::StaleCommand& c) {
                   out.mutable_behind()->set_committed(c.committed.value);
                   *out.mutable_behind()->mutable_member() = ToProto(c.member);
                 },
                 [&](const epoch::HashCommand& c) {
                   v1::Attest* to = out.mutable_attest();
                   to->set_verification(c.verification);
                   to->set_content(c.content.value);
                   *to->mutable_member() = ToProto(c.member);
                   *to->mutable_reading() = ToProto(c.reading);
                   to->set_rank(c.rank);
                 },
                 [&](const epoch::ExcludeCommand& c) {
                   v1::Exclude* to = out.mutable_exclude();
                   to->set_epoch(c.epoch.value);
                   *to->mutable_member() = ToProto(c.member);
                   *to->mutable_plan() = ToProto(c.plan);
                   for (const ParticipantId reader : c.readers) to->add_readers(reader.value);
                 },
             },
             command);
  return out;
}

Result<epoch::Command> FromProto(const v1::SessionDown& down) {
  switch (down.kind_case()) {
    case v1::SessionDown::kPrepare:
      return PrepareFromProto(down.prepare());
    case v1::SessionDown::kTransfer:
      return TransferFromProto(down.transfer());
    case v1::SessionDown::kRelease:
      return ReleaseFromProto(down.release());
    case v1::SessionDown::kCommit:
      return CommitFromProto(down.commit());
    case v1::SessionDown::kInstalled:
      return InstalledFromProto(down.installed());
    case v1::SessionDown::kAbort:
      return AbortFromProto(down.abort());
    case v1::SessionDown::kEvicted:
      return EvictFromProto(down.evicted());
    case v1::SessionDown::kBehind:
      return BehindFromProto(down.behind());
    case v1::SessionDown::kAttest:
      return AttestFromProto(down.attest());
    case v1::SessionDown::kExclude:
      return ExcludeFromProto(down.exclude());
    default:
      return Fail(Bad("session", "a message that is no command"));
  }
}

v1::ReportRequest ToProto(AgentId agent, const epoch::Report& report) {
  v1::ReportRequest out;
  out.set_agent(agent.value);
  out.set_epoch(EpochOf(report));
  std::visit([&](const auto& r) { *out.mutable_member() = ToProto(r.member); }, report);
  SetBody(report, &out);
  return out;
}

Result<AgentReport> FromProto(const v1::ReportRequest& request) {
  if (request.agent() == 0) return Fail(Bad("agent", "must not be 0"));
  WW_ASSIGN(epoch::Member member, FromProto("member", request.member()));
  if (request.epoch() == 0 && request.kind_case() != v1::ReportRequest::kLost) {
    return Fail(Bad("epoch", "must not be 0"));
  }
  WW_ASSIGN(epoch::Report report, BodyFromProto(Epoch(request.epoch()), member, request));
  WW_ASSIGN(std::vector<epoch::Span> spans, SpansFromProto(request));
  std::visit(
      [&](auto& r) {
        if constexpr (requires { r.spans; }) r.spans = std::move(spans);
      },
      report);
  return AgentReport{AgentId(request.agent()), std::move(report)};
}

}  // namespace weightwire::wire
