#pragma once

#include <grpcpp/support/status.h>

#include "server/base/status.h"

namespace weightwire::rpc {

/// A failed status carries its ErrorDetail in grpc-status-details-bin.
grpc::Status ToGrpc(const Status& status);
/// OK, or what wire::FromCall makes of the failure, with a remedy where gRPC itself failed.
Status FromGrpc(const grpc::Status& status);

}  // namespace weightwire::rpc
