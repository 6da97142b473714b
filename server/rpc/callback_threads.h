#pragma once

namespace weightwire::rpc {

/// Keeps gRPC's threads of callbacks until the process ends. gRPC ends them with the last channel
/// or server that uses callbacks; where that is let go on one of those very threads, which any call
/// may do after its answer, the thread joins itself and their queue is freed twice (gRPC 1.51).
/// Idempotent, thread-safe; belongs before the first channel.
void KeepCallbackThreads();

}  // namespace weightwire::rpc
