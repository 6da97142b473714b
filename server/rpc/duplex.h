#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <grpcpp/support/server_callback.h>

#include "server/rpc/call_log.h"
#include "server/rpc/grpc_status.h"
#include "server/rpc/runtime.h"
#include "server/rpc/stream_set.h"
#include "server/rpc/unary.h"

namespace weightwire::rpc {

/// One bidirectional stream: writes from any thread are queued and go out in order; it is finished
/// exactly once. Held by itself from Begin until gRPC is done with it, then by whoever shares it.
template <typename Up, typename Down>
class Duplex : public grpc::ServerBidiReactor<Up, Down>,
               public EndableStream,
               public std::enable_shared_from_this<Duplex<Up, Down>> {
 public:
  Duplex(const Runtime& runtime, StreamSet& streams, CallLog log)
      : runtime_(runtime), streams_(streams), log_(std::move(log)) {}

  /// After construction, before the reactor is returned to gRPC.
  void Begin() {
    self_ = this->shared_from_this();
    id_ = streams_.Add(std::weak_ptr<EndableStream>(self_));
    runtime_.strand.PostAfter(kHelloLimit, [weak = std::weak_ptr<Duplex>(self_)] {
      if (auto stream = weak.lock()) stream->EndIfSilent();
    });
    this->StartRead(&up_);
  }

  /// A reader that does not keep up ends the stream.
  void Send(Down message) {
    std::unique_lock lock(mutex_);
    if (ending_) return;
    if (queue_.size() >= runtime_.stream_queue_max) {
      lock.unlock();
      return End(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                        "the reader of this stream does not keep up"));
    }
    queue_.push_back(std::move(message));
    if (queue_.size() == 1) this->StartWrite(&queue_.front());
  }

  void End(Status status) override {
    std::lock_guard lock(mutex_);
    if (ending_) return;
    ending_ = std::move(status);
    if (queue_.empty()) FinishLocked();
  }

  void OnReadDone(bool ok) final {
    if (!ok) return End(OkStatus());
    if (Status size = CheckMessage(runtime_, up_.ByteSizeLong()); !size.ok()) return End(size);
    heard_ = true;
    if (OnMessage(up_)) ReadOn();
  }

  void OnWriteDone(bool ok) final {
    std::lock_guard lock(mutex_);
    queue_.pop_front();
    if (!ok) {
      queue_.clear();
      if (!ending_) ending_ = Status(Code::kUnavailable, Reason::kTransportFailed, "write failed");
    }
    if (!queue_.empty()) {
      this->StartWrite(&queue_.front());
    } else if (ending_) {
      FinishLocked();
    }
  }

  void OnCancel() final {
    End(Status(Code::kCancelled, Reason::kTransportFailed, "the stream broke"));
  }

  void OnDone() final {
    streams_.Remove(id_);
    OnEnded();
    self_.reset();
  }

 protected:
  /// On a gRPC thread, one after another. False: the next one is not read before ReadOn, so that
  /// whoever sends more than is taken has to wait.
  virtual bool OnMessage(const Up& up) = 0;
  /// Any thread.
  void ReadOn() {
    std::lock_guard lock(mutex_);
    if (!finished_) this->StartRead(&up_);
  }
  /// Once, on a gRPC thread, when nothing more is read or written.
  virtual void OnEnded() = 0;
  const Runtime& runtime() const { return runtime_; }
  const CallLog& log() const { return log_; }

 private:
  /// A stream without its first message holds a place for nobody.
  static constexpr std::chrono::seconds kHelloLimit{10};

  void EndIfSilent() {
    if (heard_) return;
    End(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
               "no hello came within 10 s of the stream's start"));
  }

  void FinishLocked() {
    if (finished_) return;
    finished_ = true;
    log_.Ended(*ending_);
    this->Finish(ToGrpc(*ending_));
  }

  const Runtime& runtime_;
  StreamSet& streams_;
  CallLog log_;
  Up up_;
  std::atomic<bool> heard_ = false;
  std::mutex mutex_;
  std::deque<Down> queue_;  ///< the first one is being written
  std::optional<Status> ending_;
  bool finished_ = false;
  uint64_t id_ = 0;
  std::shared_ptr<Duplex> self_;
};

}  // namespace weightwire::rpc
