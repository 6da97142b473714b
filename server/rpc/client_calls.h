#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include "server/base/executor.h"
#include "server/base/status.h"
#include "server/rpc/grpc_status.h"

namespace weightwire::rpc {

/// The calls of one client that gRPC holds now. Shared with them, because their last callback may
/// run while the client goes. Thread-safe.
class ClientCalls {
 public:
  explicit ClientCalls(Executor& strand) : strand_(strand) {}

  /// False when the client is going: the call must not be started.
  bool Begin(grpc::ClientContext* context) {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    contexts_.insert(context);
    return true;
  }
  /// gRPC has let go of the call. `then` runs on the strand, unless the client is going.
  void End(grpc::ClientContext* context, Task then) {
    Post(std::move(then));
    std::lock_guard lock(mutex_);
    contexts_.erase(context);
    if (contexts_.empty()) empty_.notify_all();
  }
  void Post(Task task) { PostAfter(Nanos(0), std::move(task)); }
  void PostAfter(Nanos delay, Task task) {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    Task checked = [open = std::weak_ptr<int>(open_), task = std::move(task)] {
      if (open.lock()) task();
    };
    if (delay == Nanos(0)) return strand_.Post(std::move(checked));
    strand_.PostAfter(delay, std::move(checked));
  }
  /// Cancels everything and waits until gRPC holds nothing. Not on a gRPC thread.
  void Close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    open_.reset();
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    empty_.wait(lock, [this] { return contexts_.empty(); });
  }

 private:
  Executor& strand_;
  std::mutex mutex_;
  std::condition_variable empty_;
  bool closed_ = false;
  std::shared_ptr<int> open_ = std::make_shared<int>(0);  ///< queued tasks die with it
  std::set<grpc::ClientContext*> contexts_;
};

inline void SetDeadline(grpc::ClientContext& context, Nanos span) {
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::duration_cast<std::chrono::microseconds>(span));
}

template <typename Request, typename Response>
struct ClientCall {
  grpc::ClientContext context;
  Request request;
  Response response;
};

/// One unary call. `start(call, done)` starts it; `then(Result<Response>)` runs on the strand.
template <typename Response, typename Request, typename Start, typename Then>
void CallUnary(const std::shared_ptr<ClientCalls>& calls, Nanos deadline, Request request,
               Start start, Then then) {
  auto call = std::make_shared<ClientCall<Request, Response>>();
  call->request = std::move(request);
  SetDeadline(call->context, deadline);
  if (!calls->Begin(&call->context)) return;
  start(call.get(), [calls, call, then = std::move(then)](const grpc::Status& status) {
    calls->End(&call->context, [call, then, failure = FromGrpc(status)] {
      if (!failure.ok()) return then(Result<Response>(Fail(failure)));
      then(Result<Response>(std::move(call->response)));
    });
  });
}

}  // namespace weightwire::rpc
