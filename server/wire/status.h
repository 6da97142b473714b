#pragma once

#include <string>
#include <string_view>

#include "server/base/status.h"
#include "weightwire/v1/types.pb.h"

namespace weightwire::wire {

/// Texts are cut to the limits of limits.h.
v1::ErrorDetail DetailOf(const Status& status);
v1::Outcome OutcomeOf(const Status& status);
v1::RpcStatus RpcStatusOf(const Status& status);

/// kUnknownEnum when `outcome` carries a code or reason that is not known here.
Result<Status> FromProto(std::string_view field, const v1::Outcome& outcome);

/// The content of grpc-status-details-bin.
std::string EncodeDetails(const Status& status);
/// What a failed call means: `details` when it is ours and agrees with `code`, else code and
/// message alone with a reason guessed from the code (a proxy, gRPC itself, or another version
/// answered). Never OK: an unknown code is kUnknown.
Status FromCall(int code, std::string_view message, std::string_view details);

}  // namespace weightwire::wire
