#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "server/store/etcd/etcd_client.h"

namespace weightwire::store {

/// Proof of leadership: the leader's key as it was created. Every write of the leader is made on
/// the condition that it is still there, so that a leader which was stopped and goes on later
/// writes nothing.
struct Term {
  std::string key;
  int64_t revision = 0;  ///< the key's create_revision
};
/// Holds as long as `term` does; for Txn's compare.
etcdserverpb::Compare StillLeads(const Term& term);

/// Stands for leader of a job until it wins, then holds on to it by a lease. Everything happens on
/// a thread of its own, as do the calls of `Events`.
class Election {
 public:
  struct Options {
    std::string key;              ///< of the leader
    std::string name;             ///< of this candidate, for people
    std::chrono::seconds ttl{5};  ///< of the lease; a dead leader is followed after at most this
  };
  struct Events {
    /// Another one leads (again, when it changes).
    std::function<void(const std::string& leader)> stands_by;
    std::function<void(Status why)> hindered;  ///< etcd does not answer; goes on trying
    /// Once, instead of `won`: etcd refuses what it is asked for, and so it would be again.
    std::function<void(Status why)> refused;
    std::function<void(Term term)> won;  ///< once
    /// Once, after `won`: the lease ended, or may have.
    std::function<void(Status why)> lost;
  };

  /// `client` outlives it.
  Election(EtcdClient& client, Options options, Events events);
  /// Gives the leadership back.
  ~Election();
  Election(const Election&) = delete;
  Election& operator=(const Election&) = delete;

 private:
  void Run();
  Result<bool> Stand();
  Result<std::optional<etcdserverpb::KeyValue>> Leader();
  Result<bool> Campaign();
  void Hold();
  Status Renew();
  /// False: the election is over.
  bool Pause(Nanos pause);

  EtcdClient& client_;
  const Options options_;
  const Events events_;
  int64_t lease_ = 0;
  Term term_;
  Nanos valid_until_{};  ///< of the lease, at least
  std::string told_;     ///< the leader that `stands_by` was told
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace weightwire::store
