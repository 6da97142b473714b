#include "server/coordinator/outbox.h"

namespace weightwire::coordinator {

void Outbox::Send(const PortPtr& port, epoch::Command command) {
  strand_.Post([port, command = std::move(command)]() mutable {
    if (port->target != nullptr) port->target->OnCommand(std::move(command));
  });
}

void Outbox::EndSession(const PortPtr& port, Status why) {
  (*leaving_)[port->agent] = port;
  strand_.Post([port, leaving = leaving_, why = std::move(why)]() mutable {
    leaving->erase(port->agent);
    control::AgentPort* target = std::exchange(port->target, nullptr);
    if (target != nullptr) target->OnSessionLost(std::move(why));
  });
}

PortPtr Outbox::Leaving(AgentId agent) const {
  const auto found = leaving_->find(agent);
  return found == leaving_->end() ? nullptr : found->second;
}

void Outbox::Reply(control::Done done, Status status) {
  strand_.Post([done = std::move(done), status = std::move(status)] { done(status); });
}

}  // namespace weightwire::coordinator
