#include "server/wire/control.h"

#include <algorithm>
#include <limits>
#include <string>

#include "server/wire/checks.h"
#include "server/wire/layout.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

Result<uint16_t> ProtocolFromProto(std::string_view field, uint32_t number) {
  if (number > std::numeric_limits<uint16_t>::max()) {
    return Fail(Bad(field, "is not a protocol version"));
  }
  return static_cast<uint16_t>(number);
}

v1::Claim ToProto(const control::RejoinState& claim) {
  v1::Claim out;
  out.set_serving_epoch(claim.serving.epoch.value);
  out.set_serving_version(claim.serving.version.value);
  if (!claim.holds.empty()) {
    out.set_spare_epoch(claim.holds.front().epoch.value);
    out.set_spare_version(claim.holds.front().version.value);
  }
  SetContents(claim.holds, 1, out.mutable_spare_beyond());
  out.set_staged(claim.staged.value);
  out.set_content(claim.content.value);
  out.set_version(claim.version.value);
  out.set_told(claim.told);
  out.set_released(claim.released.value);
  return out;
}

Result<control::RejoinState> FromProto(const v1::Claim& claim) {
  control::RejoinState out;
  out.serving = {Epoch(claim.serving_epoch()), Version(claim.serving_version())};
  WW_ASSIGN(
      out.holds,
      ContentsFromProto("claim.spare", {Epoch(claim.spare_epoch()), Version(claim.spare_version())},
                        claim.spare_beyond()));
  out.staged = Epoch(claim.staged());
  out.content = Epoch(claim.content());
  out.version = Version(claim.version());
  out.told = claim.told();
  if (claim.released() != 0) {
    WW_FAIL_IF_ERROR(CheckVersion("claim.released", claim.released()));
  }
  out.released = Version(claim.released());
  return out;
}

constexpr std::string_view kHeldOrder = "names contents, newest first";

/// `out` and what `held` names beyond it.
Result<epoch::Contents> Contents(std::string_view field, epoch::Contents out,
                                 const HeldContents& held) {
  WW_FAIL_IF_ERROR(CheckCount(field, static_cast<size_t>(held.size()), kHeldMax));
  for (const v1::HeldContent& next : held) {
    const Epoch epoch(next.epoch());
    if (epoch == Epoch{} || (!out.empty() && !(epoch < out.back().epoch))) {
      return Fail(Bad(field, kHeldOrder));
    }
    out.push_back({epoch, Version(next.version())});
  }
  return out;
}

}  // namespace

void SetContents(const epoch::Contents& contents, size_t skip, HeldContents* out) {
  for (size_t i = skip; i < contents.size(); ++i) {
    v1::HeldContent* to = out->Add();
    to->set_epoch(contents[i].epoch.value);
    to->set_version(contents[i].version.value);
  }
}

Result<epoch::Contents> ContentsFromProto(std::string_view field, const epoch::Content& newest,
                                          const HeldContents& beyond) {
  if (newest.epoch != Epoch{}) return Contents(field, {newest}, beyond);
  if (!beyond.empty()) return Fail(Bad(field, kHeldOrder));
  return epoch::Contents{};
}

Result<epoch::Contents> ContentsFromProto(std::string_view field, const HeldContents& held) {
  return Contents(field, {}, held);
}

uint32_t MillisOf(Nanos span) {
  const auto millis = std::chrono::ceil<std::chrono::milliseconds>(span).count();
  return static_cast<uint32_t>(
      std::clamp<int64_t>(millis, 0, std::numeric_limits<uint32_t>::max()));
}

v1::Member ToProto(const epoch::Member& member) {
  v1::Member out;
  out.set_participant(member.id.value);
  out.set_incarnation(member.incarnation.value);
  return out;
}

Result<epoch::Member> FromProto(std::string_view field, const v1::Member& member) {
  if (member.participant() == 0 || member.incarnation() == 0) {
    return Fail(Bad(field, "needs a participant and an incarnation"));
  }
  return epoch::Member{ParticipantId(member.participant()), Incarnation(member.incarnation())};
}

v1::GroupRole ToProto(control::GroupRole role) { return static_cast<v1::GroupRole>(role); }

Result<control::GroupRole> FromProto(std::string_view field, v1::GroupRole role) {
  if (role == v1::GROUP_ROLE_TRAINER) return control::GroupRole::kTrainer;
  if (role == v1::GROUP_ROLE_ENGINE) return control::GroupRole::kEngine;
  return Fail(UnknownEnum(field, role));
}

v1::AgentHello ToProto(const control::AgentHello& hello) {
  v1::AgentHello out;
  out.mutable_protocol()->set_min(hello.protocol_min);
  out.mutable_protocol()->set_max(hello.protocol_max);
  out.mutable_protocol()->set_features(hello.features);
  out.set_job(hello.job);
  out.set_name(CleanText(hello.name, kIdBytesMax));
  out.set_incarnation(hello.incarnation.value);
  out.set_host(hello.host);
  out.mutable_addresses()->insert(hello.addresses.begin(), hello.addresses.end());
  return out;
}

Result<control::AgentHello> FromProto(const v1::AgentHello& hello) {
  control::AgentHello out;
  WW_ASSIGN(out.protocol_min, ProtocolFromProto("hello.protocol.min", hello.protocol().min()));
  WW_ASSIGN(out.protocol_max, ProtocolFromProto("hello.protocol.max", hello.protocol().max()));
  WW_FAIL_IF_ERROR(CheckId("hello.job", hello.job()));
  WW_FAIL_IF_ERROR(CheckText("hello.name", hello.name(), kIdBytesMax));
  WW_FAIL_IF_ERROR(CheckText("hello.host", hello.host(), kAddressBytesMax));
  if (hello.incarnation() == 0) return Fail(Bad("hello.incarnation", "must not be 0"));
  WW_ASSIGN(out.addresses, AddressesFromProto("hello.addresses", hello.addresses()));
  out.features = hello.protocol().features();
  out.job = hello.job();
  out.name = hello.name();
  out.incarnation = Incarnation(hello.incarnation());
  out.host = hello.host();
  return out;
}

void SetTroubles(const control::Troubles& troubles, v1::Heartbeat* out) {
  out->clear_troubles();
  for (const control::Trouble& trouble : troubles) {
    if (static_cast<size_t>(out->troubles_size()) == kTroublesMax) return;
    v1::Heartbeat::Trouble* to = out->add_troubles();
    if (trouble.member != epoch::Member{}) *to->mutable_member() = ToProto(trouble.member);
    to->set_what(CleanText(trouble.what, kTextBytesMax));
    to->set_remedy(CleanText(trouble.remedy, kTextBytesMax));
  }
}

control::Troubles TroublesOf(const v1::Heartbeat& heartbeat) {
  control::Troubles out;
  for (const v1::Heartbeat::Trouble& from : heartbeat.troubles()) {
    if (out.size() == kTroublesMax) break;
    control::Trouble trouble;
    if (from.has_member()) {
      auto member = FromProto("member", from.member());
      if (!member) continue;
      trouble.member = *member;
    }
    trouble.what = CleanText(from.what(), kTextBytesMax);
    trouble.remedy = CleanText(from.remedy(), kTextBytesMax);
    out.push_back(std::move(trouble));
  }
  return out;
}

void SetBeat(const control::Beat& beat, v1::Heartbeat* out) {
  SetTroubles(beat.troubles, out);
  out->clear_receiving();
  for (const control::Receiving& rank : beat.receiving) {
    if (static_cast<size_t>(out->receiving_size()) == kReceivingMax) return;
    v1::Heartbeat::Receiving* to = out->add_receiving();
    *to->mutable_member() = ToProto(rank.member);
    to->set_epoch(rank.epoch.value);
    to->set_bytes_done(rank.bytes_done);
  }
}

control::Beat BeatOf(const v1::Heartbeat& heartbeat) {
  control::Beat out{TroublesOf(heartbeat), {}};
  for (const v1::Heartbeat::Receiving& from : heartbeat.receiving()) {
    if (out.receiving.size() == kReceivingMax) break;
    auto member = FromProto("member", from.member());
    if (!member || from.bytes_done() < 0) continue;
    out.receiving.push_back({*member, Epoch(from.epoch()), from.bytes_done()});
  }
  return out;
}

v1::AgentWelcome ToProto(const control::AgentWelcome& welcome) {
  v1::AgentWelcome out;
  out.set_agent(welcome.agent.value);
  out.set_protocol(welcome.protocol);
  out.set_heartbeat_ms(MillisOf(welcome.heartbeat));
  out.set_lease_ms(MillisOf(welcome.lease));
  out.set_history(welcome.history.value);
  out.set_features(welcome.features);
  return out;
}

Result<control::AgentWelcome> FromProto(const v1::AgentWelcome& welcome) {
  control::AgentWelcome out;
  if (welcome.agent() == 0) return Fail(Bad("welcome.agent", "must not be 0"));
  if (welcome.heartbeat_ms() == 0 || welcome.lease_ms() == 0) {
    return Fail(Bad("welcome", "needs heartbeat_ms and lease_ms"));
  }
  WW_ASSIGN(out.protocol, ProtocolFromProto("welcome.protocol", welcome.protocol()));
  out.agent = AgentId(welcome.agent());
  out.heartbeat = std::chrono::milliseconds(welcome.heartbeat_ms());
  out.lease = std::chrono::milliseconds(welcome.lease_ms());
  out.history = JournalId(welcome.history());
  out.features = welcome.features();
  return out;
}

v1::RegisterRequest ToProto(const control::RegisterRequest& request) {
  v1::RegisterRequest out;
  out.set_agent(request.agent.value);
  out.set_job(request.job);
  out.set_role(ToProto(request.role));
  out.set_group(request.group);
  out.set_rank(request.rank);
  out.set_world_size(request.world_size);
  out.set_incarnation(request.incarnation.value);
  out.set_pid(request.pid);
  out.set_trace_id(TraceIdToProto(request.trace_id));
  if (request.claim != control::RejoinState{}) *out.mutable_claim() = ToProto(request.claim);
  out.set_previous(request.previous.value);
  return out;
}

Result<control::RegisterRequest> FromProto(const v1::RegisterRequest& request) {
  control::RegisterRequest out;
  WW_ASSIGN(out.role, FromProto("role", request.role()));
  WW_FAIL_IF_ERROR(CheckId("job", request.job()));
  WW_FAIL_IF_ERROR(CheckId("group", request.group()));
  WW_ASSIGN(out.trace_id, TraceIdFromProto("trace_id", request.trace_id()));
  if (request.agent() == 0) return Fail(Bad("agent", "must not be 0"));
  if (request.incarnation() == 0) return Fail(Bad("incarnation", "must not be 0"));
  out.agent = AgentId(request.agent());
  out.job = request.job();
  out.group = request.group();
  out.rank = request.rank();
  out.world_size = request.world_size();
  out.incarnation = Incarnation(request.incarnation());
  out.pid = request.pid();
  WW_ASSIGN(out.claim, FromProto(request.claim()));
  out.previous = Incarnation(request.previous());
  return out;
}

v1::SubmitLayoutRequest LayoutRequestOf(const control::LayoutSubmission& submission) {
  v1::SubmitLayoutRequest out;
  *out.mutable_member() = ToProto(submission.member);
  *out.mutable_layout() = ToProto(submission);
  return out;
}

Result<control::LayoutSubmission> FromProto(const v1::SubmitLayoutRequest& request) {
  WW_ASSIGN(epoch::Member member, FromProto("member", request.member()));
  WW_ASSIGN(control::LayoutSubmission out, FromProto("layout", request.layout()));
  out.member = member;
  return out;
}

v1::SubmitLayoutResponse ToProto(const control::LayoutReply& reply) {
  v1::SubmitLayoutResponse out;
  *out.mutable_agreed() = ToProto(*reply.agreed);
  out.set_canonical_high(reply.canonical.high);
  out.set_canonical_low(reply.canonical.low);
  for (const std::string& note : reply.notes) out.add_notes(note);
  return out;
}

Result<control::LayoutReply> FromProto(const v1::SubmitLayoutResponse& reply) {
  control::LayoutReply out;
  WW_ASSIGN(layout::RankLayout agreed, FromProto("agreed", reply.agreed()));
  out.agreed = std::make_shared<const layout::RankLayout>(std::move(agreed));
  out.canonical = {reply.canonical_high(), reply.canonical_low()};
  out.notes.assign(reply.notes().begin(), reply.notes().end());
  return out;
}

v1::PublishVersionRequest ToProto(const control::PublishRequest& request) {
  v1::PublishVersionRequest out;
  *out.mutable_member() = ToProto(request.member);
  out.set_version(request.version.value);
  out.set_manual_commit(request.manual_commit);
  out.set_deadline_ms(MillisOf(request.deadline));
  out.set_trace_id(TraceIdToProto(request.trace_id));
  out.set_number(request.number);
  out.set_lineage(request.lineage);
  return out;
}

Result<control::PublishRequest> FromProto(const v1::PublishVersionRequest& request) {
  control::PublishRequest out;
  WW_ASSIGN(out.member, FromProto("member", request.member()));
  WW_ASSIGN(out.trace_id, TraceIdFromProto("trace_id", request.trace_id()));
  WW_FAIL_IF_ERROR(CheckVersion("version", request.version()));
  if (request.deadline_ms() == 0) return Fail(Bad("deadline_ms", "must not be 0"));
  out.version = Version(request.version());
  out.manual_commit = request.manual_commit();
  out.deadline = std::chrono::milliseconds(request.deadline_ms());
  out.number = request.number();
  out.lineage = request.lineage();
  return out;
}

v1::WithdrawVersionRequest ToProto(const control::WithdrawRequest& request) {
  v1::WithdrawVersionRequest out;
  *out.mutable_member() = ToProto(request.member);
  out.set_version(request.version.value);
  out.set_number(request.number);
  return out;
}

Result<control::WithdrawRequest> FromProto(const v1::WithdrawVersionRequest& request) {
  control::WithdrawRequest out;
  WW_ASSIGN(out.member, FromProto("member", request.member()));
  if (request.version() == 0) return Fail(Bad("version", "must not be 0"));
  if (request.number() == 0) return Fail(Bad("number", "must not be 0"));
  out.version = Version(request.version());
  out.number = request.number();
  return out;
}

}  // namespace weightwire::wire
