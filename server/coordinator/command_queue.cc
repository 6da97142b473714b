#include "server/coordinator/command_queue.h"

#include "server/base/failpoint.h"

namespace weightwire::coordinator {
namespace {

/// Some members know, others do not yet.
struct Delivered {
  void operator()(const epoch::PrepareCommand&) const {
    WW_FAILPOINT("coordinator.after_a_prepare_sent");
  }
  void operator()(const epoch::TransferCommand&) const {
    WW_FAILPOINT("coordinator.after_a_transfer_sent");
  }
  void operator()(const epoch::ReleaseCommand&) const {
    WW_FAILPOINT("coordinator.after_a_release_sent");
  }
  void operator()(const epoch::CommitCommand&) const {
    WW_FAILPOINT("coordinator.after_a_commit_sent");
  }
  void operator()(const epoch::CommittedEverywhereCommand&) const {
    WW_FAILPOINT("coordinator.after_an_installed_sent");
  }
  void operator()(const epoch::AbortCommand&) const {
    WW_FAILPOINT("coordinator.after_an_abort_sent");
  }
  void operator()(const epoch::EvictCommand&) const {
    WW_FAILPOINT("coordinator.after_an_evict_sent");
  }
  void operator()(const epoch::StaleCommand&) const {
    WW_FAILPOINT("coordinator.after_a_behind_sent");
  }
  void operator()(const epoch::HashCommand&) const {
    WW_FAILPOINT("coordinator.after_an_attest_sent");
  }
  void operator()(const epoch::ExcludeCommand&) const {
    WW_FAILPOINT("coordinator.after_an_exclude_sent");
  }
};

}  // namespace

void CommandQueue::Send(const PortPtr& port, epoch::Command command) {
  strand_.Post(cancel_.Bind([port, command = std::move(command)] {
    if (port->target == nullptr) return;
    port->target->OnCommand(command);
    std::visit(Delivered{}, command);
  }));
}

void CommandQueue::EndSession(const PortPtr& port, Status why) {
  leaving_[port->agent] = port;
  strand_.Post(cancel_.Bind([this, port, why = std::move(why)] {
    leaving_.erase(port->agent);
    control::AgentPort* target = std::exchange(port->target, nullptr);
    if (target != nullptr) target->OnSessionLost(why);
  }));
}

PortPtr CommandQueue::Leaving(AgentId agent) const {
  const auto found = leaving_.find(agent);
  return found == leaving_.end() ? nullptr : found->second;
}

void CommandQueue::Reply(control::Done done, Status status) {
  strand_.Post([done = std::move(done), status = std::move(status)] { done(status); });
}

}  // namespace weightwire::coordinator
