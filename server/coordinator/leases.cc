#include "server/coordinator/leases.h"

#include <algorithm>
#include <string>

namespace weightwire::coordinator {

Leases::~Leases() { strand_.Cancel(timer_); }

void Leases::Watch() {
  if (timer_ != 0 || membership_.sessions().empty()) return;
  Nanos earliest = Nanos::max();
  for (const auto& [id, session] : membership_.sessions()) {
    earliest = std::min(earliest, session.heard);
  }
  const Nanos delay = std::max(earliest + options_.lease - clock_.Now(), options_.heartbeat);
  due_ = clock_.Now() + delay;
  timer_ = strand_.PostAfter(delay, lifeline_.Bind([this] { Check(); }));
}

void Leases::Check() {
  timer_ = 0;
  const Nanos now = clock_.Now();
  const bool late = now - due_ > options_.heartbeat;
  std::vector<AgentId> silent;
  for (const auto& [id, session] : membership_.sessions()) {
    if (late) membership_.Heard(id, now);
    if (now - session.heard >= options_.lease) silent.push_back(id);
  }
  for (AgentId agent : silent) {
    const Session& session = membership_.sessions().at(agent);
    const auto silence = std::chrono::duration_cast<std::chrono::milliseconds>(now - session.heard);
    membership_.EndSession(agent, Status(Code::kAborted, Reason::kLeaseExpired,
                                         "agent '" + session.hello.name + "' sent nothing for " +
                                             std::to_string(silence.count()) + " ms")
                                      .Remedy("register again with new incarnations"));
  }
  Watch();
}

}  // namespace weightwire::coordinator
