#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "server/base/status.h"

namespace weightwire::rpc {

/// A server-side stream that can be ended from outside.
class EndableStream {
 public:
  virtual ~EndableStream() = default;
  /// Ends the stream with `status` after what waits to be written. Thread-safe; idempotent.
  virtual void End(Status status) = 0;
};

/// The streams of a service that are open now. Thread-safe.
class StreamSet {
 public:
  uint64_t Add(std::weak_ptr<EndableStream> stream) {
    std::lock_guard lock(mutex_);
    streams_.emplace(++next_, std::move(stream));
    return next_;
  }
  void Remove(uint64_t id) {
    std::lock_guard lock(mutex_);
    streams_.erase(id);
  }
  void EndAll(const Status& status) {
    std::map<uint64_t, std::weak_ptr<EndableStream>> streams;
    {
      std::lock_guard lock(mutex_);
      streams = streams_;
    }
    for (auto& [id, weak] : streams) {
      if (auto stream = weak.lock()) stream->End(status);
    }
  }

 private:
  std::mutex mutex_;
  uint64_t next_ = 0;
  std::map<uint64_t, std::weak_ptr<EndableStream>> streams_;
};

}  // namespace weightwire::rpc
