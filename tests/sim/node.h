#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/transport/fake/fake_transport.h"
#include "tests/sim/process_executor.h"
#include "tests/sim/sim_port.h"

namespace weightwire::sim {

/// A pod's sidecar: transports, transfer engine and agent of one process lifetime after another.
class Node {
 public:
  struct Surroundings {
    testing::SimExecutor& executor;
    std::mt19937_64& random;
    transport::FakeNetwork& network;
    std::function<coordinator::Coordinator*()> coordinator;
    transfer::Tuning tuning;
  };
  /// Nodes on one `host` map each other's memory; others read over the network.
  Node(Surroundings& surroundings, std::string name, std::string host);
  ~Node();

  void Start();
  /// kill -9: sessions break, nothing is said or drained.
  void Kill(bool coordinator_learns);
  bool alive() const { return agent_ != nullptr; }

  agent::Agent& agent() { return *agent_; }
  SimPort& port() { return port_; }
  const std::string& name() const { return name_; }
  std::string tcp_address() const { return name_ + ":tcp"; }

  /// Told when the agent's process ended: applications see their sockets close.
  std::vector<std::function<void()>> on_killed;

 private:
  Surroundings& s_;
  const std::string name_, host_;
  SimPort port_;
  /// One per lifetime; kept, because what is left of a dead process may still post to its own.
  std::vector<std::unique_ptr<ProcessExecutor>> threads_;
  std::vector<std::unique_ptr<transport::Transport>> transports_;
  std::unique_ptr<transfer::Engine> engine_;
  std::unique_ptr<agent::Agent> agent_;
};

}  // namespace weightwire::sim
