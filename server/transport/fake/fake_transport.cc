#include "server/transport/fake/fake_transport.h"

#include <utility>

#include "server/transport/fake/fake_endpoint.h"
#include "server/transport/fake/fake_world.h"
#include "server/transport/handshake.h"
#include "server/transport/operation.h"

namespace weightwire::transport {
namespace {

class FakeTransport final : public Transport {
 public:
  explicit FakeTransport(std::shared_ptr<FakeNode> node) : node_(std::move(node)) {
    WW_CHECK(node_->world->nodes.emplace(node_->address, node_.get()).second);
  }

  ~FakeTransport() override {
    node_->world->nodes.erase(node_->address);
    // An endpoint that is closing already is still in the map; its posted end finds nothing to do.
    while (!node_->endpoints.empty()) {
      auto endpoint = node_->endpoints.begin()->second;
      endpoint->Close();
      endpoint->Settle();
    }
    node_->handler = nullptr;
  }

  const std::string& name() const override { return node_->options.name; }
  Capabilities capabilities() const override {
    Capabilities capabilities;
    capabilities.map = node_->options.map;
    capabilities.gets_device_memory = node_->options.gets_device_memory;
    capabilities.flush_device_writes = node_->options.flush_device_writes;
    capabilities.tells_leaving = true;
    capabilities.chunk_bytes_max = node_->options.chunk_bytes_max;
    capabilities.gets_in_flight_max = node_->options.gets_in_flight_max;
    return capabilities;
  }
  Status Viable() const override { return OkStatus(); }
  Status Start(Handler* handler, Incarnation self) override {
    WW_CHECK(node_->handler == nullptr && handler != nullptr);
    node_->handler = handler;
    node_->self = self;
    return OkStatus();
  }
  std::string address() const override { return node_->address; }
  RegionKey Export(GatherList pieces) override { return ExportTold(std::move(pieces), nullptr); }
  RegionKey ExportTold(GatherList pieces, Leaving leaving) override {
    for (const memory::RegionSpan& piece : pieces) {
      WW_CHECK(node_->options.gets_device_memory || !piece.region->on_device());
    }
    return node_->exports.Export(std::move(pieces), std::move(leaving));
  }
  void Revoke(RegionKey key, std::function<void()> done) override {
    node_->exports.Revoke(key, std::move(done));
  }
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override;

 private:
  std::shared_ptr<FakeNode> node_;
};

/// One Connect under way. Whatever comes first, answer or deadline, takes `done`.
struct Connecting {
  std::shared_ptr<FakeNode> caller;
  std::string address;
  Hello hello;
  Transport::ConnectDone done;
  Executor::TimerId timer = 0;
};

/// Runs at the caller's side.
void Answer(Connecting& connecting, Result<std::shared_ptr<Endpoint>> result) {
  if (!connecting.done) return;
  connecting.caller->world->strand.Cancel(connecting.timer);
  std::exchange(connecting.done, nullptr)(std::move(result));
}

/// All of it at once, with the messages that sockets would carry. What the callee made of it.
Result<Hello> Handshake(const Hello& said, FakeNode& callee_node) {
  CallerHandshake caller(said);
  const auto first = EncodeCallerHello(caller.caller_hello());
  const CalleeHandshake callee(caller.caller_hello(), first, callee_node.self,
                               *callee_node.handler);
  WW_FAIL_IF_ERROR(StatusOf(callee.reply()));
  if (!callee.awaits_proof()) return callee.hello();
  WW_ASSIGN(const auto proof, caller.OnCalleeProof(first, callee.callee_proof()));
  WW_ASSIGN(const CalleeReply verdict, callee.OnProof(proof));
  WW_FAIL_IF_ERROR(StatusOf(verdict));
  return callee.hello();
}

/// Runs at the callee's side.
void Arrive(const std::shared_ptr<Connecting>& connecting) {
  FakeNetwork::World& world = *connecting->caller->world;
  const FakeLink& link = world.Link(connecting->caller->address, connecting->address).link;
  auto answer = [&](Result<std::shared_ptr<Endpoint>> result) {
    world.strand.PostAfter(
        link.latency, [connecting, result = std::move(result)] { Answer(*connecting, result); });
  };
  if (connecting->caller->handler == nullptr) return answer(Fail(ClosedHere()));
  auto entry = world.nodes.find(connecting->address);
  if (entry == world.nodes.end() || entry->second->handler == nullptr) {
    return answer(Fail(Code::kUnavailable, Reason::kTransportFailed,
                       "nobody listens at " + connecting->address));
  }
  if (link.refuse_hello) {
    return answer(Fail(StatusOf({0, 0, Code::kUnauthenticated, Reason::kTicketRejected})));
  }
  FakeNode& callee = *entry->second;
  auto hello = Handshake(connecting->hello, callee);
  if (!hello.has_value()) return answer(Fail(hello.error()));
  auto ours = std::make_shared<FakeEndpoint>(callee.shared_from_this(), connecting->caller->address,
                                             *hello);
  auto theirs =
      std::make_shared<FakeEndpoint>(connecting->caller, connecting->address, connecting->hello);
  FakeEndpoint::Join(ours, theirs);
  world.strand.PostAfter(link.latency, [connecting, theirs] {
    if (connecting->done && theirs->open()) {
      theirs->Announce();
      Answer(*connecting, theirs);
    } else {
      theirs->Close();
      Answer(*connecting, Fail(Code::kUnavailable, Reason::kTransportFailed,
                               "the session ended before it was open"));
    }
  });
  ours->Announce();
  ours->DelayNotifiesUntil(world.clock.Now() + link.latency);
  callee.handler->OnAccepted(ours);
}

void FakeTransport::Connect(const std::string& address, const Hello& hello, Nanos timeout,
                            ConnectDone done) {
  FakeNetwork::World& world = *node_->world;
  auto connecting = std::make_shared<Connecting>(
      Connecting{.caller = node_, .address = address, .hello = hello, .done = std::move(done)});
  connecting->timer = world.strand.PostAfter(timeout, [connecting] {
    Answer(*connecting, Fail(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                             "no answer from " + connecting->address));
  });
  const FakeLink& link = world.Link(node_->address, address).link;
  if (!link.silent) world.strand.PostAfter(link.latency, [connecting] { Arrive(connecting); });
}

}  // namespace

FakeNode::FakeNode(std::shared_ptr<FakeNetwork::World> the_world, std::string the_address,
                   FakeOptions the_options)
    : world(std::move(the_world)),
      address(std::move(the_address)),
      options(std::move(the_options)),
      exports([w = world.get()](Task task) { w->strand.Post(std::move(task)); }) {}

FakeLinkState& FakeNetwork::World::Link(const std::string& from, const std::string& to) {
  auto [entry, is_new] = links.try_emplace({from, to});
  if (is_new) entry->second.link = default_link;
  return entry->second;
}

FakeNetwork::FakeNetwork(Executor& strand, Clock& clock, uint64_t seed)
    : world_(std::make_shared<World>(strand, clock, seed)) {}
FakeNetwork::~FakeNetwork() = default;

std::unique_ptr<Transport> FakeNetwork::MakeTransport(const std::string& address,
                                                      FakeOptions options) {
  return std::make_unique<FakeTransport>(
      std::make_shared<FakeNode>(world_, address, std::move(options)));
}

void FakeNetwork::SetDefaultLink(FakeLink link) { world_->default_link = link; }

void FakeNetwork::SetLink(const std::string& from, const std::string& to, FakeLink link) {
  world_->links[{from, to}] = FakeLinkState{.link = link};
}

void FakeNetwork::SetNic(const std::string& address, FakeNic nic) {
  world_->nics[address] = {.nic = nic};
}

uint64_t FakeNetwork::bytes_delivered() const { return world_->bytes_delivered; }
uint64_t FakeNetwork::bytes_through_host() const { return world_->bytes_through_host; }

void FakeNetwork::Break(const std::string& a, const std::string& b) {
  for (const auto& [here, there] : {std::pair(a, b), std::pair(b, a)}) {
    auto node = world_->nodes.find(here);
    if (node == world_->nodes.end()) continue;
    for (const auto& [id, endpoint] : std::map(node->second->endpoints)) {
      if (endpoint->peer_address() == there) endpoint->Break();
    }
  }
}

}  // namespace weightwire::transport
