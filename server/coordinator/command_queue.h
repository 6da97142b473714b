#pragma once

#include <map>
#include <memory>
#include <utility>

#include "server/base/executor.h"
#include "server/control/control.h"
#include "server/coordinator/cancel_token.h"

namespace weightwire::coordinator {

/// Where an agent's session is reached; null once nothing may be called any more.
struct Port {
  AgentId agent{};
  control::AgentPort* target = nullptr;
};
using PortPtr = std::shared_ptr<Port>;

/// Everything that leaves the coordinator goes through here and is delivered by a later task of the
/// strand, in the order of the calls: no caller and no agent is ever entered while the coordinator
/// is in the middle of a change. Replies are delivered even when the command queue is gone by then;
/// commands and ends of sessions are not.
class CommandQueue {
 public:
  explicit CommandQueue(Executor& strand) : strand_(strand) {}

  void Send(const PortPtr& port, epoch::Command command);
  /// The last call that `port` gets.
  void EndSession(const PortPtr& port, Status why);
  /// The agent says that its port ends now: what is still queued for it is dropped.
  void Forget(const PortPtr& port) { port->target = nullptr; }
  /// The port of a session whose EndSession has not been delivered yet; null when there is none.
  PortPtr Leaving(AgentId agent) const;

  template <typename T>
  void Reply(control::Reply<T> reply, Result<T> result) {
    strand_.Post([reply = std::move(reply), result = std::move(result)]() mutable {
      reply(std::move(result));
    });
  }
  void Reply(control::Done done, Status status);

 private:
  Executor& strand_;
  std::map<AgentId, PortPtr> leaving_;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
