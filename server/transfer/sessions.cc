#include "server/transfer/sessions.h"

namespace weightwire::transfer {
namespace {

Status ShuttingDown() {
  return Status(Code::kUnavailable, Reason::kShuttingDown, "this agent is shutting down");
}

/// Those of processes that share memory.
bool OnlyOnOneHost(const std::string& transport) {
  return transport == "shm" || transport == "cuda_ipc";
}

template <typename Map>
std::string NamesOf(const Map& map) {
  std::string names;
  for (const auto& entry : map) names += (names.empty() ? "" : ", ") + entry.first;
  return names.empty() ? "none" : names;
}

}  // namespace

Result<transport::Transport*> SessionTable::Choose(const Peer& peer) const {
  const bool same_host = context_->IsOnOurHost(peer);
  const Nanos now = context_->clock.Now();
  transport::Transport* first = nullptr;
  std::string why_not;
  for (const std::string& name : context_->options.preference) {
    transport::Transport* transport = context_->TransportOf(name);
    if (transport == nullptr || !peer.addresses.contains(name)) continue;
    if (OnlyOnOneHost(name) && !same_host) continue;
    if (Status can = transport->Reaches(peer.addresses.at(name)); !can.ok()) {
      why_not += "; " + name + ": " + can.message();
      continue;
    }
    const auto avoided = avoided_until_.find({peer.incarnation, name});
    if (avoided == avoided_until_.end() || avoided->second <= now) {
      if (first != nullptr) {
        context_->metrics.Add("transport_failovers_total", 1,
                              {{"from", first->name()}, {"to", transport->name()}});
      }
      return transport;
    }
    if (first == nullptr) first = transport;
  }
  if (first != nullptr) return first;
  return Fail(Code::kUnavailable, Reason::kTransportFailed,
              "no transport reaches the peer: we have " + NamesOf(context_->transports) +
                  ", it has " + NamesOf(peer.addresses) +
                  (same_host ? " on our host" : " on another host") + why_not);
}

void SessionTable::Avoid(const Peer& peer, const std::string& transport) {
  const Nanos now = context_->clock.Now();
  std::erase_if(avoided_until_, [now](const auto& entry) { return entry.second <= now; });
  avoided_until_[{peer.incarnation, transport}] = now + context_->options.avoid_after_failure;
}

void SessionTable::Connect(const Peer& peer, transport::Transport* transport, Waiter waiter) {
  if (closing_) {
    context_->strand.Post([waiter = std::move(waiter)] { waiter(Fail(ShuttingDown())); });
    return;
  }
  const Name name(peer.incarnation, transport->name());
  if (auto live = outbound_.find(name); live != outbound_.end()) {
    // The session may close before the waiter runs; then it is told so instead.
    context_->strand.Post(
        [self = shared_from_this(), endpoint = live->second, waiter = std::move(waiter)]() mutable {
          if (self->open_.contains(endpoint->id())) return waiter(std::move(endpoint));
          waiter(Fail(Code::kUnavailable, Reason::kTransportFailed, "the session has just closed"));
        });
    return;
  }
  auto [entry, first] = connecting_.try_emplace(name);
  entry->second.push_back(std::move(waiter));
  if (!first) return;
  Call(peer, transport, transport::kProtocolMax);
}

void SessionTable::Call(const Peer& peer, transport::Transport* transport, uint16_t protocol) {
  transport::Hello hello;
  hello.protocol_min = hello.protocol_max = protocol;
  hello.features = transport::kFeatureHearsWaiting;
  if (!context_->options.gpu_direct_required) hello.features |= transport::kFeatureTakesDelta;
  const bool limited = context_->tuning().rate_limit > 0 || context_->tuning().peer_rate_limit > 0;
  if (limited || !context_->IsOnOurHost(peer)) hello.features |= transport::kFeatureNarrowRoad;
  hello.caller = context_->options.self;
  hello.callee = peer.incarnation;
  hello.ticket = peer.ticket;
  transport->Connect(
      peer.addresses.at(transport->name()), hello, context_->tuning().connect_timeout,
      [self = shared_from_this(), peer, transport, protocol](auto result) {
        self->context_->strand.Post(
            [self, peer, transport, protocol, result = std::move(result)]() mutable {
              const bool older = !result.has_value() && protocol >= transport::kProtocolProof &&
                                 result.error().reason() == Reason::kProtocolVersion;
              if (older && !self->context_->options.proof_required && !self->closing_) {
                return self->Call(peer, transport, transport::kProtocolProof - 1);
              }
              self->OnConnected({peer.incarnation, transport->name()}, std::move(result));
            });
      });
}

void SessionTable::OnConnected(const Name& name,
                               Result<std::shared_ptr<transport::Endpoint>> result) {
  auto waiters = std::move(connecting_.extract(name).mapped());
  if (result.has_value()) {
    const auto& endpoint = *result;
    if (closed_early_.erase(endpoint->id()) > 0) {
      result = Fail(Code::kUnavailable, Reason::kTransportFailed, "the session closed at once");
    } else {
      open_.emplace(endpoint->id(), endpoint);
      if (closing_) {
        endpoint->Close();
        result = Fail(ShuttingDown());
      } else {
        outbound_.emplace(name, endpoint);
      }
    }
  }
  for (Waiter& waiter : waiters) waiter(result);
  MaybeClosed();
}

void SessionTable::OnAccepted(const std::shared_ptr<transport::Endpoint>& endpoint) {
  open_.emplace(endpoint->id(), endpoint);
  if (closing_) endpoint->Close();
}

void SessionTable::OnClosed(const std::shared_ptr<transport::Endpoint>& endpoint) {
  if (open_.erase(endpoint->id()) == 0) closed_early_.insert(endpoint->id());
  std::erase_if(outbound_, [&](const auto& entry) { return entry.second == endpoint; });
  MaybeClosed();
}

void SessionTable::CloseAll(std::function<void()> done) {
  closing_ = true;
  closed_.push_back(std::move(done));
  for (const auto& entry : open_) entry.second->Close();
  MaybeClosed();
}

void SessionTable::MaybeClosed() {
  if (!closing_ || !open_.empty() || !connecting_.empty()) return;
  for (auto& done : std::exchange(closed_, {})) done();
}

}  // namespace weightwire::transfer
