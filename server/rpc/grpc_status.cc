#include "server/rpc/grpc_status.h"

#include "server/wire/checks.h"
#include "server/wire/limits.h"
#include "server/wire/status.h"

namespace weightwire::rpc {

grpc::Status ToGrpc(const Status& status) {
  if (status.ok()) return grpc::Status::OK;
  // The message must equal RpcStatus.message: standard clients compare them.
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      wire::CleanText(status.message(), wire::kErrorMessageBytesMax),
                      wire::EncodeDetails(status));
}

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return wire::FromCall(status.error_code(), status.error_message(), status.error_details());
}

}  // namespace weightwire::rpc
