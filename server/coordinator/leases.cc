#include "server/coordinator/leases.h"

#include <algorithm>

namespace weightwire::coordinator {

Leases::~Leases() { strand_.Cancel(timer_); }

void Leases::Watch() {
  if (timer_ != 0) return;
  const auto end = membership_.NextLeaseEnd();
  if (!end) return;
  const Nanos delay = std::max(*end - clock_.Now(), options_.heartbeat);
  due_ = clock_.Now() + delay;
  timer_ = strand_.PostAfter(delay, cancel_.Bind([this] { Check(); }));
}

void Leases::Check() {
  timer_ = 0;
  const Nanos now = clock_.Now();
  if (now - due_ > options_.heartbeat) {
    membership_.RenewLeases(now);
  } else if (!membership_.EndLeases(now)) {
    due_ = now;
    timer_ = strand_.PostAfter(Nanos(0), cancel_.Bind([this] { Check(); }));
    return;
  }
  Watch();
}

}  // namespace weightwire::coordinator
