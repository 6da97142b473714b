#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/transport/fake/fake_transport.h"
#include "tests/sim/sim_port.h"

namespace weightwire::sim {

/// A pod's sidecar: transports, transfer engine and agent of one process lifetime after another.
/// Each lifetime has addresses of its own.
class Node {
 public:
  struct Surroundings {
    testing::SimExecutor& executor;
    std::mt19937_64& random;
    transport::FakeNetwork& network;
    std::function<coordinator::Coordinator*()> coordinator;
    /// Resets every connection of an address.
    std::function<void(const std::string& address)> disconnect;
    transfer::Tuning tuning;
    transfer::DeltaPolicy delta;
  };
  /// Nodes on one `host` map each other's memory; others read over the network.
  Node(Surroundings& surroundings, std::string name, std::string host);
  ~Node();

  void Start();
  /// kill -9: connections are reset, nothing is said any more. (What the operating system would
  /// reclaim at once, the dead engine gives back later, unseen by anyone: see Reclaimed.)
  void Kill(bool coordinator_learns);
  bool alive() const { return agent_ != nullptr; }
  /// Nothing is left of dead lifetimes.
  bool Reclaimed() const { return remains_.empty(); }

  agent::Agent& agent() { return *agent_; }
  SimPort& port() { return port_; }
  const std::string& name() const { return name_; }
  std::string shm_address() const { return address("shm"); }
  std::string tcp_address() const { return address("tcp"); }

  /// Told when the agent's process ended: applications see their sockets close.
  std::vector<std::function<void()>> on_killed;

 private:
  struct Remains {
    std::unique_ptr<transfer::Engine> engine;
    std::vector<std::unique_ptr<transport::Transport>> transports;  ///< destroyed first
  };
  std::string address(const char* transport) const {
    return name_ + "#" + std::to_string(life_) + ":" + transport;
  }

  Surroundings& s_;
  const std::string name_, host_;
  SimPort port_;
  uint64_t life_ = 0;
  std::unique_ptr<transfer::Engine> engine_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::unique_ptr<agent::Agent> agent_;
  std::map<uint64_t, Remains> remains_;  ///< by life
};

}  // namespace weightwire::sim
