#include "server/transport/fake/fake_endpoint.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "server/transport/operation.h"

namespace weightwire::transport {
namespace {

/// Counts an operation; true when the link is to drop the connection at it.
bool CountDrops(FakeLinkState& state) { return ++state.operations == state.link.drop_at_operation; }

/// When `bytes` have passed something that handles one thing after another and is free from
/// `busy_until`, if they come at `now`.
Nanos Pass(Nanos& busy_until, Nanos now, uint64_t bytes, uint64_t bytes_per_second) {
  const Nanos start = std::max(now, busy_until);
  if (bytes_per_second == 0) return start;
  busy_until = start + Nanos(static_cast<int64_t>(static_cast<double>(bytes) * 1e9 /
                                                  static_cast<double>(bytes_per_second)));
  return busy_until;
}

Status Closed(const char* why) { return Status(Code::kUnavailable, Reason::kTransportFailed, why); }

}  // namespace

FakeEndpoint::FakeEndpoint(std::shared_ptr<FakeNode> node, std::string peer_address, Hello hello)
    : node_(std::move(node)), peer_address_(std::move(peer_address)), hello_(hello) {}

void FakeEndpoint::Join(const std::shared_ptr<FakeEndpoint>& a,
                        const std::shared_ptr<FakeEndpoint>& b) {
  a->peer_ = b;
  b->peer_ = a;
  a->node_->endpoints.emplace(a->id(), a);
  b->node_->endpoints.emplace(b->id(), b);
}

template <typename Action>
void FakeEndpoint::After(Nanos delay, Action action) {
  node_->world->strand.PostAfter(delay, [weak = weak_from_this(), action = std::move(action)] {
    if (auto self = weak.lock()) action(*self);
  });
}

void FakeEndpoint::Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                       std::shared_ptr<void> hold, GetDone done) {
  if (Status can = CheckGetBytes(TotalBytes(into), node_->options.chunk_bytes_max); !can.ok()) {
    node_->world->strand.Post(
        [can = std::move(can), done = std::move(done), hold = std::move(hold)] { done(can); });
    return;
  }
  Operation operation;
  operation.key = key;
  operation.offset = offset;
  operation.into = std::move(into);
  operation.hold = std::move(hold);
  operation.get_done = std::move(done);
  Begin(std::move(operation), timeout);
}

void FakeEndpoint::Map(RegionKey key, Nanos timeout, MapDone done) {
  if (!node_->options.map) {
    node_->world->strand.Post([done = std::move(done)] {
      done(Fail(Code::kUnimplemented, Reason::kInvalidRequest, "this transport cannot map"));
    });
    return;
  }
  Operation operation;
  operation.key = key;
  operation.map_done = std::move(done);
  Begin(std::move(operation), timeout);
}

void FakeEndpoint::Begin(Operation operation, Nanos timeout) {
  if (settled_) {
    node_->world->strand.Post([operation = std::make_shared<Operation>(std::move(operation)),
                               why = *closed_] { Complete(*operation, Fail(why)); });
    return;
  }
  const uint64_t number = next_operation_++;
  operation.timer = node_->world->strand.PostAfter(timeout, [weak = weak_from_this(), number] {
    if (auto self = weak.lock()) self->Expire(number);
  });
  operations_.emplace(number, std::move(operation));
  waiting_.push_back(number);
  Advance();
}

void FakeEndpoint::Advance() {
  while (!closed_.has_value() && !waiting_.empty() &&
         in_flight_ < node_->options.gets_in_flight_max) {
    const uint64_t number = waiting_.front();
    waiting_.pop_front();
    ++in_flight_;
    Launch(number);
  }
}

void FakeEndpoint::Launch(uint64_t number) {
  FakeLinkState& state = node_->world->Link(node_->address, peer_address_);
  if (CountDrops(state)) {
    After(state.link.latency, [](FakeEndpoint& self) { self.Break(); });
  } else if (!state.link.silent) {
    if (auto peer = peer_.lock()) {
      peer->After(state.link.latency, [number](FakeEndpoint& self) { self.Serve(number); });
    }
  }
}

void FakeEndpoint::Serve(uint64_t number) {
  auto reader = peer_.lock();
  if (closed_.has_value() || reader == nullptr) return;
  auto operation = reader->operations_.find(number);
  if (operation == reader->operations_.end()) return;
  auto exported = node_->exports.Use(operation->second.key);
  if (!exported.has_value()) {
    const FakeLink& link = node_->world->Link(peer_address_, node_->address).link;
    reader->After(link.latency, [number, why = exported.error()](FakeEndpoint& self) {
      self.Finish(number, Fail(why));
    });
  } else if (operation->second.map_done) {
    ServeMap(number, std::move(*exported));
  } else {
    ServeGet(number, std::move(*exported));
  }
}

void FakeEndpoint::ServeMap(uint64_t number, std::shared_ptr<const Exported> exported) {
  MappedList list;
  auto regions = std::make_shared<std::vector<std::shared_ptr<memory::MemoryRegion>>>();
  for (const PieceRange& range : exported->All()) {
    const ConstSpan span = range.span();
    list.pieces.push_back({span.data(), span.size()});
    regions->push_back(*range.region);
  }
  list.hold = std::move(regions);
  const FakeLink& link = node_->world->Link(peer_address_, node_->address).link;
  peer_.lock()->After(link.latency,
                      [number, list](FakeEndpoint& self) { self.Finish(number, list); });
}

void FakeEndpoint::ServeGet(uint64_t number, std::shared_ptr<const Exported> exported) {
  auto reader = peer_.lock();
  const Operation& operation = reader->operations_.at(number);
  FakeNetwork::World& world = *node_->world;
  FakeLinkState& state = world.Link(peer_address_, node_->address);
  const uint64_t bytes = TotalBytes(operation.into);
  auto ranges = bytes > node_->options.chunk_bytes_max
                    ? Fail(Code::kInvalidArgument, Reason::kMessageTooLarge, "over the chunk limit")
                    : exported->Slice(operation.offset, bytes);
  if (!ranges.has_value()) {
    reader->After(state.link.latency, [number, why = ranges.error()](FakeEndpoint& self) {
      self.Finish(number, Fail(why));
    });
    return;
  }
  exported->Tell(operation.offset, bytes);
  serving_.emplace(number, std::move(exported));
  Nanos due = Pass(state.busy_until, world.clock.Now(), bytes, state.link.bytes_per_second);
  if (auto nic = world.nics.find(node_->address); nic != world.nics.end()) {
    due = Pass(nic->second.egress_busy_until, due, bytes, nic->second.nic.egress_bytes_per_second);
  }
  due += state.link.latency;
  if (state.link.get_jitter_max.count() > 0) {
    const auto jitter_max = static_cast<uint64_t>(state.link.get_jitter_max.count());
    due += Nanos(static_cast<int64_t>(world.random() % (jitter_max + 1)));
  }
  reader->After(due - world.clock.Now(), [number, ranges = std::move(*ranges)](FakeEndpoint& self) {
    self.Receive(number, ranges);
  });
}

void FakeEndpoint::Receive(uint64_t number, std::vector<PieceRange> ranges) {
  FakeNetwork::World& world = *node_->world;
  auto nic = world.nics.find(node_->address);
  auto operation = operations_.find(number);
  if (nic == world.nics.end() || operation == operations_.end()) return Deliver(number, ranges);
  const Nanos due =
      Pass(nic->second.ingress_busy_until, world.clock.Now(), TotalBytes(operation->second.into),
           nic->second.nic.ingress_bytes_per_second);
  After(due - world.clock.Now(),
        [number, ranges = std::move(ranges)](FakeEndpoint& self) { self.Deliver(number, ranges); });
}

void FakeEndpoint::Deliver(uint64_t number, const std::vector<PieceRange>& ranges) {
  auto source = peer_.lock();
  auto entry = operations_.find(number);
  if (source == nullptr || entry == operations_.end()) return;
  auto served = source->serving_.find(number);
  if (served == source->serving_.end()) return;  // the source has closed: `ranges` may be gone
  const std::shared_ptr<const Exported> keep = std::move(served->second);
  source->serving_.erase(served);

  const std::vector<MutableSpan>& into = entry->second.into;
  Status status;
  auto range = ranges.begin();
  uint64_t taken = 0;  // of *range
  for (MutableSpan span : into) {
    while (!span.empty() && status.ok()) {
      const uint64_t bytes = std::min<uint64_t>(span.size(), range->bytes - taken);
      status = Write(span, {range->region, range->offset + taken, bytes});
      span = span.subspan(bytes);
      taken += bytes;
      if (taken < range->bytes) continue;
      ++range;
      taken = 0;
    }
  }
  if (status.ok()) status = MaybeCorrupt(into);
  if (!status.ok()) return Finish(number, Fail(std::move(status)));
  Finish(number, MappedList{});
}

// All of `source`, to the beginning of `target`.
Status FakeEndpoint::Write(const MutableSpan& target, const PieceRange& source) {
  WW_CHECK(node_->options.gets_device_memory || !target.on_device());
  FakeNetwork::World& world = *node_->world;
  world.bytes_delivered += source.bytes;
  if (!target.on_device() || !(*source.region)->on_device()) {
    world.bytes_through_host += source.bytes;
  }
  if (!target.on_device()) return device::CopyRun(target.at(), source.at(), source.bytes);
  return node_->options.write_device(target.at(), source.at(), source.bytes);
}

Status FakeEndpoint::MaybeCorrupt(const std::vector<MutableSpan>& into) {
  FakeNetwork::World& world = *node_->world;
  FakeLinkState& state = world.Link(node_->address, peer_address_);
  ++state.gets;
  if (state.link.corrupt_every_get == 0 || state.gets % state.link.corrupt_every_get != 0 ||
      !std::bernoulli_distribution(state.link.corrupt_probability)(world.random)) {
    return OkStatus();
  }
  uint64_t victim = world.random() % TotalBytes(into);
  auto span = into.begin();
  for (; victim >= span->size(); ++span) victim -= span->size();
  const device::Bytes at = span->at() + victim;
  std::byte bad{};
  WW_RETURN_IF_ERROR(device::CopyRun({&bad}, at, 1));
  bad ^= std::byte{0x10};
  return span->on_device() ? node_->options.write_device(at, &bad, 1)
                           : device::CopyRun(at, &bad, 1);
}

void FakeEndpoint::Finish(uint64_t number, Result<MappedList> result) {
  auto entry = operations_.find(number);
  if (entry == operations_.end()) return;
  Operation operation = std::move(entry->second);
  operations_.erase(entry);
  node_->world->strand.Cancel(operation.timer);
  --in_flight_;
  Complete(operation, std::move(result));
  Advance();
}

void FakeEndpoint::Complete(Operation& operation, Result<MappedList> result) {
  if (operation.map_done) {
    operation.map_done(std::move(result));
  } else {
    operation.get_done(result.has_value() ? OkStatus() : result.error());
  }
  operation.hold.reset();
}

void FakeEndpoint::Expire(uint64_t number) {
  auto entry = operations_.find(number);
  if (entry == operations_.end()) return;
  auto operation = std::make_shared<Operation>(std::move(entry->second));
  operations_.erase(entry);
  if (auto peer = peer_.lock()) peer->serving_.erase(number);
  Complete(*operation, Fail(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                            "the operation outlived its deadline"));
  const FakeLink& link = node_->world->Link(node_->address, peer_address_).link;
  const Status why = Closed("an operation outlived its deadline");
  if (auto peer = peer_.lock(); peer != nullptr && !link.silent) peer->Shut(why);
  Shut(why);
}

Status FakeEndpoint::Notify(std::span<const std::byte> message) {
  if (message.size() > kNotifyBytesMax) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge, "a notify of over 64 bytes");
  }
  if (closed_.has_value()) return Closed("the session has ended");
  if (notifies_queued_ >= node_->options.notifies_queued_max) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded, "the notify queue is full");
  }
  FakeNetwork::World& world = *node_->world;
  FakeLinkState& state = world.Link(node_->address, peer_address_);
  auto peer = peer_.lock();
  if (CountDrops(state)) {
    After(state.link.latency, [](FakeEndpoint& self) { self.Break(); });
    return OkStatus();
  }
  ++notifies_queued_;
  if (state.link.silent || peer == nullptr) return OkStatus();
  notify_due_ = std::max(world.clock.Now() + state.link.latency, notify_due_);
  peer->After(notify_due_ - world.clock.Now(),
              [bytes = std::vector<std::byte>(message.begin(), message.end()),
               sender = weak_from_this()](FakeEndpoint& self) {
                if (auto from = sender.lock()) --from->notifies_queued_;
                if (self.closed_.has_value() || self.node_->handler == nullptr) return;
                self.node_->handler->OnNotify(self.shared_from_this(), bytes);
              });
  return OkStatus();
}

void FakeEndpoint::Close() {
  if (closed_.has_value()) return;
  const FakeLink& link = node_->world->Link(node_->address, peer_address_).link;
  Shut(Status(Code::kCancelled, Reason::kNone, "closed by this side"));
  auto peer = peer_.lock();
  if (peer == nullptr || link.silent) return;
  // As an end of stream does, it arrives behind the notifies.
  const Nanos now = node_->world->clock.Now();
  peer->After(std::max(now + link.latency, notify_due_) - now,
              [](FakeEndpoint& self) { self.Shut(Closed("the peer closed the session")); });
}

void FakeEndpoint::Break() {
  Shut(Closed("the connection broke"));
  if (auto peer = peer_.lock()) peer->Shut(Closed("the connection broke"));
}

void FakeEndpoint::Shut(const Status& why) {
  if (closed_.has_value()) return;
  closed_ = why;
  waiting_.clear();
  serving_.clear();
  node_->world->strand.Post([self = shared_from_this()] { self->Settle(); });
}

void FakeEndpoint::Settle() {
  if (settled_) return;
  settled_ = true;
  auto operations = std::exchange(operations_, {});
  for (auto& [number, operation] : operations) {
    node_->world->strand.Cancel(operation.timer);
    Complete(operation, Fail(*closed_));
  }
  const auto self = shared_from_this();
  node_->endpoints.erase(id());
  if (announced_ && node_->handler != nullptr) node_->handler->OnClosed(self, *closed_);
}

}  // namespace weightwire::transport
