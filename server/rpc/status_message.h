#pragma once

#include "server/coordinator/coordinator.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::rpc {

/// The snapshot as a message; the oldest epochs are left off where it would be longer than clients
/// take (wire::kStatusBytesMax). Pure.
v1::StatusResponse StatusMessageOf(const coordinator::StatusSnapshot& snapshot);
v1::DescribeEpochResponse StoryMessageOf(const coordinator::EpochStory& story);
v1::RollbackResponse RollbackMessageOf(const coordinator::RolledBack& result);
v1::VerifyResponse VerifyMessageOf(const coordinator::Verification& result);

}  // namespace weightwire::rpc
