#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "server/base/clock.h"
#include "server/control/control.h"

namespace weightwire::rpc {

/// The processes at an agent's socket, as the system knows them. Thread-safe; never blocks but for
/// a read of /proc.
class LocalProcesses {
 public:
  explicit LocalProcesses(Clock& clock) : clock_(clock) {}

  /// Remembers who is at the other end of a Unix socket.
  void Connected(int socket);
  /// Somebody of another user was turned away. True for the first one of this user, of whom a log
  /// is to say so: an application that tries again and again is logged once.
  bool Refused(uint32_t uid);

  /// It lives and does not run: SIGSTOP, or a debugger. False for whoever has never connected: the
  /// number that a process tells of itself means another one here, when it has a PID namespace of
  /// its own.
  bool Stopped(int64_t pid) const;
  /// It has connected, and is gone; false for whoever has never connected, as above.
  bool Ended(int64_t pid) const;
  /// Who was turned away in the last ten minutes: the latest one.
  control::Troubles Refusals() const;

 private:
  /// When it began; nothing for whoever has never connected.
  std::optional<uint64_t> Began(int64_t pid) const;

  Clock& clock_;
  mutable std::mutex mutex_;
  std::map<int64_t, uint64_t> known_;  ///< pid → when it began, as /proc says
  struct Refusal {
    uint32_t uid = 0;
    Nanos at{};
    std::string wall;  ///< the same for people; a text that does not change is told once
  };
  std::optional<Refusal> refused_;
  std::set<uint32_t> uids_refused_;
};

}  // namespace weightwire::rpc
