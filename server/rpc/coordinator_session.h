#pragma once

#include <grpcpp/support/server_callback.h>

#include "server/coordinator/coordinator.h"
#include "server/rpc/acl.h"
#include "server/rpc/runtime.h"
#include "server/rpc/stream_set.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::rpc {

/// An agent's session over gRPC: hello, heartbeats and reports up, commands down.
grpc::ServerBidiReactor<v1::SessionUp, v1::SessionDown>* StartSession(
    const Runtime& runtime, StreamSet& streams, coordinator::Coordinator& coordinator, Acl& acl,
    const grpc::CallbackServerContext& context);

}  // namespace weightwire::rpc
