#pragma once

#include <deque>
#include <map>
#include <memory>

#include "server/base/executor.h"
#include "server/transfer/notify.h"
#include "server/transport/transport.h"

namespace weightwire::transfer {

/// Sends messages in order, and keeps those for which a session's queue is full just now. What it
/// keeps is bounded by the streams' windows. Strand-only.
class NotifyQueue : public std::enable_shared_from_this<NotifyQueue> {
 public:
  explicit NotifyQueue(Executor& strand) : strand_(strand) {}

  /// A session that takes messages no more is closed; its OnClosed ends the streams.
  void Send(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& notify);
  /// The session has ended.
  void Forget(uint64_t endpoint) { waiting_.erase(endpoint); }

 private:
  struct Queue {
    std::shared_ptr<transport::Endpoint> endpoint;
    std::deque<NotifyBytes> messages;
  };
  /// True when nothing is left to send on this session.
  bool Flush(Queue& queue);
  void ArmTimer();

  Executor& strand_;
  std::map<uint64_t, Queue> waiting_;  ///< by endpoint; only those with messages
  bool timer_armed_ = false;
};

}  // namespace weightwire::transfer
