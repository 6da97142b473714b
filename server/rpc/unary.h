#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include <grpcpp/support/server_callback.h>

#include "server/base/status.h"
#include "server/rpc/authorizer.h"
#include "server/rpc/call_log.h"
#include "server/rpc/grpc_status.h"

namespace weightwire::rpc {

/// kResourceExhausted / kMessageTooLarge when `bytes` is over the limit of `runtime`.
inline Status CheckMessage(const Runtime& runtime, size_t bytes) {
  if (bytes <= runtime.message_bytes_max) return OkStatus();
  return Status(Code::kResourceExhausted, Reason::kMessageTooLarge,
                "the message has " + std::to_string(bytes) + " bytes; the limit is " +
                    std::to_string(runtime.message_bytes_max))
      .Remedy("send a smaller message, or raise message_bytes_max on the server");
}

/// A unary call. It is finished exactly once: by the first answer, by its cancellation (deadline,
/// vanished client), or, when nobody is left who could answer, with kShuttingDown.
template <typename Response>
class UnaryReactor final : public grpc::ServerUnaryReactor {
 public:
  UnaryReactor(CallLog log, Response* response) : log_(std::move(log)), response_(response) {}

  void Hold(std::shared_ptr<UnaryReactor> self) { self_ = std::move(self); }

  /// Only the first call has an effect: it alone may touch the response.
  void Answer(Result<Response> result) {
    if (answered_.exchange(true)) return;
    const Status status = result ? OkStatus() : result.error();
    if (result) response_->Swap(&*result);
    log_.Ended(status);
    Finish(ToGrpc(status));
  }

  void OnCancel() override {
    Answer(Fail(Code::kCancelled, Reason::kDeadlineExceeded,
                "the caller went away or its deadline passed"));
  }
  void OnDone() override { self_.reset(); }

 private:
  CallLog log_;
  Response* response_;
  std::atomic<bool> answered_ = false;
  std::shared_ptr<UnaryReactor> self_;
};

/// Gives the call its answer, from any thread. Copyable.
template <typename Response>
class Answer {
 public:
  explicit Answer(std::shared_ptr<UnaryReactor<Response>> call)
      : last_(std::make_shared<Last>(std::move(call))) {}
  void operator()(Result<Response> result) const { last_->call->Answer(std::move(result)); }
  /// For calls that answer nothing but success.
  void operator()(const Status& status) const {
    if (status.ok()) return (*this)(Response());
    (*this)(Result<Response>(Fail(status)));
  }

 private:
  struct Last {
    explicit Last(std::shared_ptr<UnaryReactor<Response>> c) : call(std::move(c)) {}
    ~Last() {
      call->Answer(Fail(Code::kUnavailable, Reason::kShuttingDown, "the server is shutting down"));
    }
    std::shared_ptr<UnaryReactor<Response>> call;
  };
  std::shared_ptr<Last> last_;
};

/// Runs `start(answer)` on the calling gRPC thread: it converts and posts.
template <typename Request, typename Response, typename Start>
grpc::ServerUnaryReactor* StartUnary(const Runtime& runtime, grpc::CallbackServerContext* context,
                                     const char* method, const Request& request, Response* response,
                                     Start start) {
  auto call =
      std::make_shared<UnaryReactor<Response>>(CallLog(runtime, *context, method), response);
  call->Hold(call);
  grpc::ServerUnaryReactor* reactor = call.get();
  Answer<Response> answer(std::move(call));
  if (Status exposed = CheckNotExposed(*context); !exposed.ok()) {
    answer(exposed);
  } else if (Status size = CheckMessage(runtime, request.ByteSizeLong()); !size.ok()) {
    answer(size);
  } else {
    start(std::move(answer));
  }
  return reactor;
}

}  // namespace weightwire::rpc
