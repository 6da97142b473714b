#include "server/transfer/notify_queue.h"

#include <iterator>

namespace weightwire::transfer {
namespace {

constexpr Nanos kRetry = std::chrono::microseconds(500);

}  // namespace

void NotifyQueue::Send(const std::shared_ptr<transport::Endpoint>& endpoint, const Notify& notify) {
  Queue& queue = waiting_[endpoint->id()];
  queue.endpoint = endpoint;
  queue.messages.push_back(EncodeNotify(notify));
  // With others before it, it waits for the timer like them.
  if (queue.messages.size() > 1) return;
  if (Flush(queue)) {
    waiting_.erase(endpoint->id());
  } else {
    ArmTimer();
  }
}

bool NotifyQueue::Flush(Queue& queue) {
  while (!queue.messages.empty()) {
    const Status status = queue.endpoint->Notify(queue.messages.front().span());
    if (status.code() == Code::kResourceExhausted) return false;
    if (!status.ok()) {
      queue.endpoint->Close();
      return true;
    }
    queue.messages.pop_front();
  }
  return true;
}

void NotifyQueue::ArmTimer() {
  if (timer_armed_) return;
  timer_armed_ = true;
  strand_.PostAfter(kRetry, [self = shared_from_this()] {
    self->timer_armed_ = false;
    for (auto entry = self->waiting_.begin(); entry != self->waiting_.end();) {
      entry = self->Flush(entry->second) ? self->waiting_.erase(entry) : std::next(entry);
    }
    if (!self->waiting_.empty()) self->ArmTimer();
  });
}

}  // namespace weightwire::transfer
