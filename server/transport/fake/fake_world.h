#pragma once

#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "server/transport/export_table.h"
#include "server/transport/fake/fake_transport.h"

namespace weightwire::transport {

class FakeEndpoint;

/// What one transport is to the network. Outlives the transport where endpoints are still held.
struct FakeNode : std::enable_shared_from_this<FakeNode> {
  FakeNode(std::shared_ptr<FakeNetwork::World> the_world, std::string the_address,
           FakeOptions the_options);

  const std::shared_ptr<FakeNetwork::World> world;
  const std::string address;
  const FakeOptions options;
  ExportTable exports;
  Handler* handler = nullptr;  ///< null before Start and after the transport's end
  Incarnation self{};
  std::map<uint64_t, std::shared_ptr<FakeEndpoint>> endpoints;  ///< open, or closing
};

/// A link with its counts.
struct FakeLinkState {
  FakeLink link;
  uint64_t operations = 0;
  uint64_t gets = 0;
  Nanos busy_until{0};
};

struct FakeNicState {
  FakeNic nic;
  Nanos egress_busy_until{0};
  Nanos ingress_busy_until{0};
};

struct FakeNetwork::World {
  World(Executor& the_strand, Clock& the_clock, uint64_t seed)
      : strand(the_strand), clock(the_clock), random(seed) {}

  FakeLinkState& Link(const std::string& from, const std::string& to);

  Executor& strand;
  Clock& clock;
  std::mt19937_64 random;
  uint64_t bytes_delivered = 0;
  uint64_t bytes_through_host = 0;
  FakeLink default_link;
  std::map<std::pair<std::string, std::string>, FakeLinkState> links;
  std::map<std::string, FakeNicState> nics;  ///< by address; those with limits
  std::map<std::string, FakeNode*> nodes;    ///< by address; started or not
};

}  // namespace weightwire::transport
