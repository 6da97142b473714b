#pragma once

#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/base/thread_executor.h"
#include "server/rpc/session_call.h"
#include "server/tls/credentials.h"

/// Thousands of members of one coordinator, over real connections, in one process.
namespace weightwire::load {

struct Shape {
  std::string coordinator;
  uint32_t agents = 256;
  uint32_t ranks = 1;  ///< behind each agent, which is one engine
  tls::TlsFiles tls;   ///< of all of them; none: plaintext
};

/// What went wrong; all of it must stay 0.
struct Trouble {
  uint64_t sessions_lost = 0;
  uint64_t calls_failed = 0;
  uint64_t evictions = 0;
  std::string first;  ///< in words
};

/// Agents that open a session each, on a connection of their own, register their ranks and send
/// heartbeats as a real one does. Nothing is ever published. Every method runs on `strand`.
class LoadClients {
 public:
  /// `strand` outlives it.
  LoadClients(Shape shape, ThreadExecutor& strand);
  /// Closes every session. Not on the strand.
  ~LoadClients();

  /// Opens sessions, a few at a time; `done` once every rank is registered.
  void Open(std::function<void()> done);
  /// Repeats registrations, which change nothing, `in_flight` at a time, until Stop.
  void Call(uint32_t in_flight);
  void Stop();

  uint32_t registered() const { return registered_; }
  const Trouble& trouble() const { return trouble_; }
  /// Seconds of each call that Call made, in no order.
  const std::vector<float>& call_seconds() const { return call_seconds_; }

 private:
  struct Agent {
    std::string name;
    Incarnation incarnation{};
    AgentId id{};
    Nanos heartbeat{};
    std::unique_ptr<v1::Coordinator::Stub> stub;
    std::shared_ptr<rpc::SessionCall> session;
  };

  void OpenNext();
  void OnDown(uint32_t index, const v1::SessionDown& down);
  void Beat(uint32_t index);
  void Register(uint32_t index, uint32_t rank, std::function<void()> then);
  void CallAgain();
  void Note(uint64_t Trouble::*count, const std::string& what);

  const Shape shape_;
  const tls::Dialer dialer_;
  const std::shared_ptr<rpc::ClientCalls> calls_;
  std::vector<Agent> agents_;
  std::mt19937_64 random_{1};
  uint32_t opened_ = 0;
  uint32_t registered_ = 0;
  bool stopped_ = false;
  std::function<void()> done_;
  Trouble trouble_;
  std::vector<float> call_seconds_;
};

}  // namespace weightwire::load
