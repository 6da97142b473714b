#include "server/coordinator/outbox.h"

namespace weightwire::coordinator {

void Outbox::Send(const PortPtr& port, epoch::Command command) {
  strand_.Post(lifeline_.Bind([port, command = std::move(command)] {
    if (port->target != nullptr) port->target->OnCommand(command);
  }));
}

void Outbox::EndSession(const PortPtr& port, Status why) {
  leaving_[port->agent] = port;
  strand_.Post(lifeline_.Bind([this, port, why = std::move(why)] {
    leaving_.erase(port->agent);
    control::AgentPort* target = std::exchange(port->target, nullptr);
    if (target != nullptr) target->OnSessionLost(why);
  }));
}

PortPtr Outbox::Leaving(AgentId agent) const {
  const auto found = leaving_.find(agent);
  return found == leaving_.end() ? nullptr : found->second;
}

void Outbox::Reply(control::Done done, Status status) {
  strand_.Post([done = std::move(done), status = std::move(status)] { done(status); });
}

}  // namespace weightwire::coordinator
