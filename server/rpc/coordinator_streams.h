#pragma once

#include <grpcpp/support/server_callback.h>

#include "server/coordinator/coordinator.h"
#include "server/rpc/runtime.h"
#include "server/rpc/stream_set.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::rpc {

/// The slice in parts of at most 256 KiB; each is built when the one before it has been written.
grpc::ServerWriteReactor<v1::SlicePart>* StartFetchSlice(const Runtime& runtime, StreamSet& streams,
                                                         coordinator::Coordinator& coordinator,
                                                         const grpc::CallbackServerContext& context,
                                                         const v1::FetchSliceRequest& request);

/// The status now and after each change, the newest one only: a slow reader misses some, and never
/// more often than the request's min_interval_ms (0: 100; at least 10). It ends with the job token
/// that opened it (token_end.h).
grpc::ServerWriteReactor<v1::StatusResponse>* StartWatch(const Runtime& runtime, StreamSet& streams,
                                                         coordinator::Coordinator& coordinator,
                                                         const grpc::CallbackServerContext& context,
                                                         const v1::WatchRequest& request);

}  // namespace weightwire::rpc
