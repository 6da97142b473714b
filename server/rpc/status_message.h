#pragma once

#include "server/coordinator/coordinator.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::rpc {

/// Of what an epoch waits for, where numbers in place of names are asked for.
inline constexpr size_t kWaitingLinesMax = 256;

/// How the epochs of a status say which engines they are of.
enum class EngineForm {
  kNames,
  kRuns,  ///< numbers: see StatusResponse.Epoch.engine_runs
};

coordinator::StatusQuery QueryOf(const v1::StatusRequest& request);
inline EngineForm FormOf(const v1::StatusRequest& request) {
  return request.engine_runs() ? EngineForm::kRuns : EngineForm::kNames;
}
/// The snapshot as a message; the oldest epochs are left off where it would be longer than clients
/// take (wire::kStatusBytesMax). Pure.
v1::StatusResponse StatusMessageOf(const coordinator::StatusSnapshot& snapshot,
                                   EngineForm form = EngineForm::kNames);
v1::DescribeEpochResponse StoryMessageOf(const coordinator::EpochTrace& trace);
v1::RollbackResponse RollbackMessageOf(const coordinator::RolledBack& result);
v1::VerifyResponse VerifyMessageOf(const coordinator::IntegrityReport& result);

}  // namespace weightwire::rpc
