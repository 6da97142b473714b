#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <grpcpp/support/server_callback.h>

#include "server/rpc/call_log.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/stream_set.h"

namespace weightwire::rpc {

/// A server-side stream of which one message at a time is on its way. Finished exactly once; held
/// by itself from Begin until gRPC is done with it.
template <typename Down>
class ServerStream : public grpc::ServerWriteReactor<Down>,
                     public EndableStream,
                     public std::enable_shared_from_this<ServerStream<Down>> {
 public:
  ServerStream(StreamSet& streams, CallLog log) : streams_(streams), log_(std::move(log)) {}

  void Begin() {
    self_ = this->shared_from_this();
    id_ = streams_.Add(std::weak_ptr<EndableStream>(self_));
  }

  void End(Status status) override {
    std::lock_guard lock(mutex_);
    if (ending_) return;
    ending_ = std::move(status);
    if (!writing_) FinishLocked();
  }

  void OnWriteDone(bool ok) final {
    {
      std::lock_guard lock(mutex_);
      writing_ = false;
      if (!ok && !ending_) {
        ending_ = Status(Code::kUnavailable, Reason::kTransportFailed, "write failed");
      }
      if (ending_) return FinishLocked();
    }
    OnWritten();
  }

  void OnCancel() final {
    End(Status(Code::kCancelled, Reason::kTransportFailed, "the reader went away"));
  }

  void OnDone() final {
    streams_.Remove(id_);
    OnEnded();
    self_.reset();
  }

 protected:
  /// Only when nothing is on its way: before the first write, or from OnWritten on.
  void Write(Down message) {
    std::lock_guard lock(mutex_);
    if (ending_) return;
    message_ = std::move(message);
    writing_ = true;
    this->StartWrite(&message_);
  }
  virtual void OnWritten() = 0;
  virtual void OnEnded() = 0;

 private:
  void FinishLocked() {
    log_.Ended(*ending_);
    this->Finish(ToGrpc(*ending_));
  }

  StreamSet& streams_;
  CallLog log_;
  std::mutex mutex_;
  Down message_;
  bool writing_ = false;
  std::optional<Status> ending_;
  uint64_t id_ = 0;
  std::shared_ptr<ServerStream> self_;
};

}  // namespace weightwire::rpc
