#include "server/coordinator/epoch_numbers.h"

#include <algorithm>

#include "server/base/failpoint.h"

namespace weightwire::coordinator {
namespace {

constexpr uint64_t kBlock = 1024;

}  // namespace

void EpochNumbers::Reserve() {
  if (reserving_ || limit_.value - next_.value > kBlock / 2) return;
  reserving_ = true;
  const Epoch limit(limit_.value + kBlock);
  WW_FAILPOINT("coordinator.before_reservation_appended");
  journal_.Append(ReserveRecord{limit, history_}, cancel_.Bind([this, limit](const Status& status) {
    WW_FAILPOINT("coordinator.after_reservation_durable");
    if (!status.ok()) return failed_(status);
    reserving_ = false;
    limit_ = std::max(limit_, limit);
    more_();
  }));
}

void EpochNumbers::Raise(Epoch next) {
  next_ = std::max(next_, next);
  limit_ = std::max(limit_, next_);  // none is left below it
}

std::optional<Epoch> EpochNumbers::Take() {
  Reserve();
  if (next_ == limit_) return std::nullopt;
  const Epoch taken = next_;
  ++next_.value;
  return taken;
}

}  // namespace weightwire::coordinator
