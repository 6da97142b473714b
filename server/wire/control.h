#pragma once

#include <string_view>
#include <utility>

#include "server/control/control.h"
#include "weightwire/v1/coordinator.pb.h"

/// What agents and coordinator say to each other. A message without an incarnation, participant or
/// (where one is meant) epoch is kInvalidArgument / kInvalidRequest.
namespace weightwire::wire {

v1::Member ToProto(const epoch::Member& member);
Result<epoch::Member> FromProto(std::string_view field, const v1::Member& member);

using HeldContents = google::protobuf::RepeatedPtrField<v1::HeldContent>;
/// Adds `contents` to `out`, but for the first `skip` of them.
void SetContents(const epoch::Contents& contents, size_t skip, HeldContents* out);
/// `newest`: of the two fields that messages had before they could name several; epoch 0: nothing,
/// then `beyond` is empty. kInvalidArgument unless all epochs are set and fall.
Result<epoch::Contents> ContentsFromProto(std::string_view field, const epoch::Content& newest,
                                          const HeldContents& beyond);
/// Of all that `held` names.
Result<epoch::Contents> ContentsFromProto(std::string_view field, const HeldContents& held);

v1::GroupRole ToProto(control::GroupRole role);
Result<control::GroupRole> FromProto(std::string_view field, v1::GroupRole role);

v1::AgentHello ToProto(const control::AgentHello& hello);
Result<control::AgentHello> FromProto(const v1::AgentHello& hello);

/// At most kTroublesMax of them.
void SetTroubles(const control::Troubles& troubles, v1::Heartbeat* out);
/// For people only, so that nothing is refused: what is too much or names nobody is left off.
control::Troubles TroublesOf(const v1::Heartbeat& heartbeat);

/// At most kReceivingMax ranks that receive.
void SetBeat(const control::Beat& beat, v1::Heartbeat* out);
/// As TroublesOf.
control::Beat BeatOf(const v1::Heartbeat& heartbeat);

v1::AgentWelcome ToProto(const control::AgentWelcome& welcome);
Result<control::AgentWelcome> FromProto(const v1::AgentWelcome& welcome);

v1::RegisterRequest ToProto(const control::RegisterRequest& request);
Result<control::RegisterRequest> FromProto(const v1::RegisterRequest& request);

v1::SubmitLayoutRequest LayoutRequestOf(const control::LayoutSubmission& submission);
Result<control::LayoutSubmission> FromProto(const v1::SubmitLayoutRequest& request);

v1::SubmitLayoutResponse ToProto(const control::LayoutReply& reply);
Result<control::LayoutReply> FromProto(const v1::SubmitLayoutResponse& reply);

/// Deadlines travel in whole milliseconds, rounded up.
v1::PublishVersionRequest ToProto(const control::PublishRequest& request);
Result<control::PublishRequest> FromProto(const v1::PublishVersionRequest& request);

v1::WithdrawVersionRequest ToProto(const control::WithdrawRequest& request);
Result<control::WithdrawRequest> FromProto(const v1::WithdrawVersionRequest& request);

v1::SessionDown ToProto(const epoch::Command& command);
/// A welcome or an end is not a command: kInvalidRequest.
Result<epoch::Command> FromProto(const v1::SessionDown& down);

v1::ReportRequest ToProto(AgentId agent, const epoch::Report& report);
struct AgentReport {
  AgentId agent{};
  epoch::Report report;
  friend bool operator==(const AgentReport&, const AgentReport&) = default;
};
Result<AgentReport> FromProto(const v1::ReportRequest& request);

/// Whole milliseconds, rounded up, at most 2^32 − 1.
uint32_t MillisOf(Nanos span);

}  // namespace weightwire::wire
