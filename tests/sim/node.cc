#include "tests/sim/node.h"

namespace weightwire::sim {

Node::Node(Surroundings& surroundings, std::string name, std::string host)
    : s_(surroundings),
      name_(std::move(name)),
      host_(std::move(host)),
      port_(s_.executor, s_.random, s_.coordinator) {}

Node::~Node() { WW_CHECK(!alive() && Reclaimed()); }

void Node::Start() {
  ++life_;
  const Incarnation incarnation{s_.random() | 1};
  transport::FakeOptions shm{.name = "shm", .map = true};
  transport::FakeOptions tcp{.name = "tcp"};
  transports_.push_back(s_.network.MakeTransport(shm_address(), shm));
  transports_.push_back(s_.network.MakeTransport(tcp_address(), tcp));
  transfer::Options options;
  options.tuning = s_.tuning;
  options.host = host_;
  options.self = incarnation;
  engine_ = transfer::Engine::Make(options, s_.executor, s_.executor, s_.executor,
                                   {transports_[0].get(), transports_[1].get()}, metrics::Null())
                .value();
  agent::Options agent_options;
  agent_options.name = name_;
  agent_options.incarnation = incarnation;
  agent_options.host = host_;
  for (const auto& transport : transports_) {
    agent_options.addresses[transport->name()] = transport->address();
  }
  agent_options.delta = s_.delta;
  port_.Revive();
  agent_options.room_deadline = std::chrono::seconds(3);
  agent_ = agent::Agent::Make(agent_options, s_.executor, s_.executor, s_.executor, port_, *engine_,
                              metrics::Null());
  agent_->Start();
}

void Node::Kill(bool coordinator_learns) {
  port_.Kill(coordinator_learns);
  agent_.reset();
  s_.disconnect(shm_address());
  s_.disconnect(tcp_address());
  Remains& remains = remains_[life_];
  remains = {std::move(engine_), std::move(transports_)};
  transports_.clear();
  remains.engine->Shutdown(
      [this, life = life_] { s_.executor.Post([this, life] { remains_.erase(life); }); });
  for (const auto& told : on_killed) told();
}

}  // namespace weightwire::sim
