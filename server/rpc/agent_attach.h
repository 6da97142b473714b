#pragma once

#include <grpcpp/support/server_callback.h>

#include "server/agent/agent.h"
#include "server/rpc/handle_table.h"
#include "server/rpc/runtime.h"
#include "server/rpc/stream_set.h"
#include "weightwire/v1/agent.pb.h"

namespace weightwire::rpc {

/// One process's Attach stream: its lease, and the way for what the agent tells it. The process is
/// in `handles` as long as it is attached.
grpc::ServerBidiReactor<v1::AttachUp, v1::AttachEvent>* StartAttach(
    const Runtime& runtime, StreamSet& streams, agent::Agent& agent, HandleTable& handles,
    const grpc::CallbackServerContext& context);

}  // namespace weightwire::rpc
