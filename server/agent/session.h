#pragma once

#include <functional>
#include <memory>

#include "server/base/executor.h"
#include "server/control/control.h"

namespace weightwire::agent {

/// Keeps one session with the coordinator: opens it, heartbeats, opens it again after a failure.
/// The pause before that is random, below a bound that grows: agents that lost a coordinator
/// together do not come back together. Belongs to the agent's strand; destroy it there.
class Session {
 public:
  /// `reconnect`: the first bound of a pause. `opened` runs whenever a session has been opened.
  /// `beat`: what a heartbeat says.
  Session(control::AgentHello hello, Nanos reconnect, Executor& strand,
          control::CoordinatorPort& coordinator, control::AgentPort* port,
          std::function<void()> opened, std::function<control::Beat()> beat);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  void Start();
  /// The coordinator (or the way to it) ended the session; a new one is opened after a pause.
  void Lost(const Status& why);
  /// Ends it for good; Start is not called again.
  void Close();

  /// OK while open; else kUnavailable with what is known.
  const Status& status() const { return status_; }
  AgentId agent() const { return welcome_.agent; }
  /// Of the coordinator that this session, or the last one, was opened with.
  JournalId history() const { return welcome_.history; }
  /// Rises with every session; tells replies of an old one apart.
  uint64_t number() const { return number_; }

 private:
  void Open();
  void Opened(Result<control::AgentWelcome> welcome);
  void Beat();
  void OpenAfterPause();

  const control::AgentHello hello_;
  const Nanos reconnect_;
  Executor& strand_;
  control::CoordinatorPort& coordinator_;
  control::AgentPort* const port_;
  const std::function<void()> opened_;
  const std::function<control::Beat()> beat_;
  Status status_;
  control::AgentWelcome welcome_;
  uint64_t number_ = 0;
  uint32_t failures_ = 0;
  bool closed_ = false;
  Executor::TimerId timer_ = 0;
  std::shared_ptr<Session*> self_ = std::make_shared<Session*>(this);
};

}  // namespace weightwire::agent
