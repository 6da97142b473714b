#include "server/transport/local_endpoint.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <cstring>
#include <string>
#include <utility>

#include "server/base/checked.h"
#include "server/transport/little_endian.h"

namespace weightwire::transport {
namespace {

constexpr size_t kRangeBytes = 24;               // region id, offset, bytes
constexpr uint64_t kPayloadBytesMax = 64 << 20;  // of a reply: 2.8 million pieces
constexpr size_t kRegionsMax = 4096;             // that a peer can make us map
constexpr size_t kCopyStretchBytes = 1 << 20;    // between two looks at the stop flag

Status Garbage(const char* what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, what);
}

/// Bytes that follow the header of `frame` on the socket.
uint64_t PayloadBytes(const Frame& frame) {
  switch (frame.type) {
    case FrameType::kNotify:
    case FrameType::kGetReply:
    case FrameType::kMapReply:
      return frame.length;
    case FrameType::kDeviceRegion:
      return kAllocationNameBytes;
    default:
      return 0;
  }
}

}  // namespace

LocalEndpoint::LocalEndpoint(std::shared_ptr<LocalCore> core, const Hello& hello, Incarnation peer,
                             std::shared_ptr<LocalStream> stream)
    : core_(std::move(core)),
      hello_(hello),
      peer_(peer),
      stream_(std::move(stream)),
      timer_(core_->loop.context()) {}

void LocalEndpoint::Start(const Task& announce) {
  auto self = shared_from_this();
  core_->Add(self);
  announce();
  stream_->Read({[self](std::span<const std::byte> unread) { return self->Consume(unread); },
                 [self](Status why, const char* cause) { self->FailSession(why, cause); }});
}

void LocalEndpoint::Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into,
                        Nanos timeout, std::shared_ptr<void> hold, GetDone done) {
  Operation operation;
  operation.get = MakeGet(key, offset, std::move(into), timeout, std::move(hold), std::move(done));
  core_->loop.Post(
      [self = shared_from_this(), posted = std::make_shared<Operation>(std::move(operation))] {
        const Status can = CheckGetBytes(posted->get.bytes, self->core_->options.chunk_bytes_max);
        if (!can.ok()) return Complete(posted->get, can);
        self->Begin(std::move(*posted));
      });
}

void LocalEndpoint::Map(RegionKey key, Nanos timeout, MapDone done) {
  Operation operation;
  operation.get.key = key;
  operation.get.deadline = DeadlineAfter(timeout);
  operation.map_done = std::move(done);
  core_->loop.Post(
      [self = shared_from_this(), posted = std::make_shared<Operation>(std::move(operation))] {
        self->Begin(std::move(*posted));
      });
}

Status LocalEndpoint::Notify(std::span<const std::byte> message) {
  if (message.size() > kNotifyBytesMax) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge, "a notify of over 64 bytes");
  }
  if (!open_) return TransportFailed("the session has ended");
  if (notifies_queued_.fetch_add(1) >= core_->options.notifies_queued_max) {
    notifies_queued_.fetch_sub(1);
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded, "the notify queue is full");
  }
  std::vector<std::byte> bytes(kFrameBytes + message.size());
  EncodeFrame({.type = FrameType::kNotify, .length = message.size()},
              std::span(bytes).first<kFrameBytes>());
  std::copy(message.begin(), message.end(), bytes.begin() + kFrameBytes);
  core_->loop.Post([self = shared_from_this(), bytes = std::move(bytes)]() mutable {
    self->stream_->Send(std::move(bytes), nullptr, [self] { self->notifies_queued_.fetch_sub(1); });
  });
  return OkStatus();
}

void LocalEndpoint::Close() {
  core_->loop.Post([self = shared_from_this()] { self->FailSession(ClosedHere(), "closed_here"); });
}

void LocalEndpoint::Begin(Operation operation) {
  if (why_.has_value()) return End(operation, EndOf(operation.get));
  deadlines_.insert(operation.get.deadline);
  waiting_.push_back(std::move(operation));
  Arm();
  Advance();
}

void LocalEndpoint::Advance() {
  const size_t limit = std::min(core_->options.gets_in_flight_max, kLocalRequestsMax);
  while (!why_.has_value() && !waiting_.empty() && asked_.size() + copying_.size() < limit) {
    const uint64_t request = next_request_++;
    Operation operation = std::move(waiting_.front());
    waiting_.pop_front();
    SendFrame({.type = operation.map_done ? FrameType::kMap : FrameType::kGet,
               .request = request,
               .key = operation.get.key,
               .offset = operation.get.offset,
               .length = operation.get.bytes});
    asked_.emplace(request, std::move(operation));
  }
}

void LocalEndpoint::End(Operation& operation, const Status& status) {
  if (operation.map_done) {
    std::exchange(operation.map_done, nullptr)(Fail(status));
  } else {
    Complete(operation.get, status);
  }
}

Status LocalEndpoint::EndOf(const GetOperation& operation) const {
  return operation.deadline <= expired_at_ ? DeadlineExceeded() : *why_;
}

void LocalEndpoint::Arm() {
  if (deadlines_.empty() || *deadlines_.begin() >= armed_) return;
  armed_ = *deadlines_.begin();
  timer_.expires_at(std::chrono::steady_clock::time_point(armed_));
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (!cancelled && !self->why_.has_value()) self->OnTimer();
  });
}

void LocalEndpoint::OnTimer() {
  armed_ = Nanos::max();
  const Nanos now = SystemClock().Now();
  if (deadlines_.empty() || *deadlines_.begin() > now) return Arm();
  expired_at_ = now;
  FailSession(TransportFailed("an operation outlived its deadline"), "deadline");
}

Result<size_t> LocalEndpoint::Consume(std::span<const std::byte> unread) {
  if (unread.size() < kFrameBytes) return 0;
  WW_ASSIGN(const Frame frame, DecodeFrame(unread.first<kFrameBytes>()));
  const uint64_t payload_bytes = PayloadBytes(frame);
  if (payload_bytes > kPayloadBytesMax) return Fail(Garbage("a message of an impossible length"));
  if (unread.size() - kFrameBytes < payload_bytes) return 0;
  WW_FAIL_IF_ERROR(OnFrame(frame, unread.subspan(kFrameBytes, payload_bytes)));
  return kFrameBytes + payload_bytes;
}

Status LocalEndpoint::OnFrame(const Frame& frame, std::span<const std::byte> payload) {
  switch (frame.type) {
    case FrameType::kGet:
    case FrameType::kMap:
      return Serve(frame);
    case FrameType::kGetReply:
    case FrameType::kMapReply:
      return OnReply(frame, payload);
    case FrameType::kNotify:
      if (payload.size() > kNotifyBytesMax) return Garbage("a notify of over 64 bytes");
      core_->handler->OnNotify(shared_from_this(), payload);
      return OkStatus();
    case FrameType::kRegion:
    case FrameType::kDeviceRegion:
      return OnRegion(frame, payload);
    case FrameType::kRegionGone:
      regions_.erase(frame.request);
      return OkStatus();
    case FrameType::kGetEnd:
      return serving_.erase(frame.request) > 0 ? OkStatus() : Garbage("the end of no Get");
    case FrameType::kSelfTest:
    case FrameType::kSelfTestEnd:
      break;
  }
  return Garbage("an unknown message");
}

Status LocalEndpoint::Serve(const Frame& frame) {
  const bool is_get = frame.type == FrameType::kGet;
  if (serving_.size() >= kLocalRequestsMax || serving_.contains(frame.request)) {
    return Garbage("too many requests");
  }
  ForgetDeadRegions();
  Frame reply{.type = is_get ? FrameType::kGetReply : FrameType::kMapReply,
              .request = frame.request};
  auto refuse = [&](const Status& why) {
    reply.code = why.code();
    reply.reason = why.reason();
    SendFrame(reply);
    return OkStatus();
  };
  if (is_get && frame.length > core_->options.chunk_bytes_max) {
    return refuse(Status(Code::kInvalidArgument, Reason::kMessageTooLarge, ""));
  }
  auto exported = core_->exports.Use(frame.key);
  if (!exported.has_value()) return refuse(exported.error());
  auto ranges = is_get ? (*exported)->Slice(frame.offset, frame.length)
                       : Result<std::vector<PieceRange>>((*exported)->All());
  if (!ranges.has_value()) return refuse(ranges.error());
  if (ranges->size() > kPayloadBytesMax / kRangeBytes) {
    return refuse(Status(Code::kResourceExhausted, Reason::kLimitExceeded, ""));
  }
  const bool on_host = std::ranges::none_of(
      *ranges, [](const PieceRange& range) { return (*range.region)->on_device(); });
  if (!on_host && (is_get || core_->devices == nullptr)) {
    return refuse(Status(Code::kUnimplemented, Reason::kInvalidRequest, ""));
  }
  const std::vector<std::byte> payload = Describe(*ranges);
  reply.length = payload.size();
  if (is_get) serving_.emplace(frame.request, std::move(*exported));
  SendFrame(reply, payload);
  return OkStatus();
}

std::vector<std::byte> LocalEndpoint::Describe(const std::vector<PieceRange>& ranges) {
  std::vector<std::byte> payload(ranges.size() * kRangeBytes);
  LittleEndianWriter writer(payload);
  for (const PieceRange& range : ranges) {
    const std::shared_ptr<memory::MemoryRegion>& region = *range.region;
    if (sent_.try_emplace(region->id(), region).second) SendRegion(region);
    writer.Put(region->id());
    writer.Put(range.offset);
    writer.Put(range.bytes);
  }
  return payload;
}

void LocalEndpoint::SendRegion(const std::shared_ptr<memory::MemoryRegion>& region) {
  Frame frame{
      .type = FrameType::kRegion, .request = region->id(), .offset = 0, .length = region->size()};
  if (!region->on_device()) {
    core_->NoteSent(region);
    return SendFrame(frame, {}, region);
  }
  const DeviceRegion told = DescribeDeviceRegion(*region);
  frame.type = FrameType::kDeviceRegion;
  frame.offset = told.offset;
  SendFrame(frame, EncodeAllocationName(told), region);
}

void LocalEndpoint::ForgetDeadRegions() {
  std::erase_if(sent_, [this](const auto& entry) {
    if (!entry.second.expired()) return false;
    SendFrame({.type = FrameType::kRegionGone, .request = entry.first});
    return true;
  });
}

// A region that cannot be mapped fails what names it, and nothing else.
Status LocalEndpoint::OnRegion(const Frame& frame, std::span<const std::byte> payload) {
  const bool on_device = frame.type == FrameType::kDeviceRegion;
  if (on_device && core_->devices == nullptr) return Garbage("GPU memory over this transport");
  memory::UniqueFd fd = stream_->TakeFd();
  if (!fd.valid() || regions_.size() >= kRegionsMax || regions_.contains(frame.request)) {
    return Garbage("a region without a descriptor, or one too many");
  }
  PeerRegion region;
  if (on_device) {
    DeviceRegion told = DecodeAllocationName(payload.first<kAllocationNameBytes>());
    told.offset = frame.offset;
    told.bytes = frame.length;
    region = core_->devices->Import(peer_, told, std::move(fd));
  } else if (!core_->IsOurs(frame.request, fd)) {
    region = memory::MemoryRegion::Import(std::move(fd), frame.length, memory::Access::kReadOnly);
  }
  if (!region && region.error().code() == Code::kInvalidArgument) return region.error();
  regions_.emplace(frame.request, std::move(region));
  return OkStatus();
}

Status LocalEndpoint::OnReply(const Frame& frame, std::span<const std::byte> payload) {
  auto entry = asked_.find(frame.request);
  if (entry == asked_.end()) return Garbage("a reply to nothing");
  const bool is_map = frame.type == FrameType::kMapReply;
  if (is_map != static_cast<bool>(entry->second.map_done)) return Garbage("the wrong reply");
  Mapped mapped;
  if (frame.code == Code::kOk) {
    WW_ASSIGN_OR_STATUS(mapped, Resolve(payload));
    if (!is_map && mapped.bytes != entry->second.get.bytes)
      return Garbage("a reply of another length");
    const bool on_host = std::ranges::all_of(
        mapped.pieces, [](const MappedPiece& piece) { return piece.at.device == nullptr; });
    if (!is_map && !on_host) return Garbage("GPU memory for a Get");
  }
  Operation operation = std::move(entry->second);
  asked_.erase(entry);
  const Status status = frame.code == Code::kOk ? mapped.status : StatusOf(frame);
  if (status.ok() && !is_map) {
    StartCopy(frame.request, std::move(operation.get), std::move(mapped));
    return OkStatus();
  }
  deadlines_.erase(deadlines_.find(operation.get.deadline));
  // The exporter holds what a Get reads until it hears of its end.
  if (frame.code == Code::kOk && !is_map) {
    SendFrame({.type = FrameType::kGetEnd, .request = frame.request});
  }
  if (!status.ok()) {
    End(operation, status);
  } else {
    MappedList list{std::move(mapped.pieces),
                    std::make_shared<decltype(mapped.regions)>(std::move(mapped.regions))};
    std::exchange(operation.map_done, nullptr)(std::move(list));
  }
  Advance();
  return OkStatus();
}

Result<LocalEndpoint::Mapped> LocalEndpoint::Resolve(std::span<const std::byte> payload) const {
  if (payload.size() % kRangeBytes != 0) return Fail(Garbage("a reply cut short"));
  Mapped mapped;
  LittleEndianReader reader(payload);
  for (size_t i = 0; i < payload.size() / kRangeBytes; ++i) {
    const auto id = reader.Take<uint64_t>();
    const auto region = regions_.find(id);
    const auto offset = reader.Take<uint64_t>();
    const auto bytes = reader.Take<uint64_t>();
    const auto end = CheckedAdd(offset, bytes);
    const auto total = CheckedAdd(mapped.bytes, bytes);
    if (region == regions_.end() || !end || !total) return Fail(Garbage("memory never sent"));
    mapped.bytes = *total;
    if (!region->second) {
      if (mapped.status.ok()) mapped.status = region->second.error();
      continue;
    }
    const std::shared_ptr<memory::MemoryRegion> memory =
        *region->second ? *region->second : core_->Ours(id);
    if (memory == nullptr) {
      if (mapped.status.ok()) {
        mapped.status = Status(Code::kNotFound, Reason::kStaleIncarnation, "its memory is gone");
      }
      continue;
    }
    if (*end > memory->size()) return Fail(Garbage("a range that leaves its memory"));
    mapped.pieces.push_back({memory->bytes() + offset, bytes});
    if (mapped.regions.empty() || mapped.regions.back() != memory) {
      mapped.regions.push_back(memory);
    }
  }
  return mapped;
}

void LocalEndpoint::StartCopy(uint64_t request, GetOperation get, Mapped mapped) {
  auto copy = std::make_shared<Copy>();
  copy->get = std::move(get);
  for (const MappedPiece& piece : mapped.pieces) copy->from.emplace_back(piece.at.at, piece.bytes);
  copy->regions = std::move(mapped.regions);
  copying_.emplace(request, copy);
  core_->copiers.Post([self = shared_from_this(), request, copy] {
    copy->whole = ForEachStretch(copy->from, copy->get.into, kCopyStretchBytes,
                                 [&copy](std::byte* to, const std::byte* from, size_t bytes) {
                                   if (copy->stop.load(std::memory_order_relaxed)) return false;
                                   std::memcpy(to, from, bytes);
                                   return true;
                                 });
    self->core_->loop.Post([self, request] { self->OnCopied(request); });
  });
}

void LocalEndpoint::OnCopied(uint64_t request) {
  const std::shared_ptr<Copy> copy = std::move(copying_.extract(request).mapped());
  // An exporter that ends the session closes its socket before it lets the memory go: a peer that
  // is there now has kept the bytes still while they were copied.
  if (!why_.has_value() && !stream_->PeerIsThere()) {
    FailSession(TransportFailed("the peer closed the session"), "peer_closed");
  }
  copy->regions.clear();  // what copied may hold `copy` a moment longer than the Get lasts
  if (why_.has_value()) {
    Complete(copy->get, EndOf(copy->get));
    return Settle();
  }
  deadlines_.erase(deadlines_.find(copy->get.deadline));
  SendFrame({.type = FrameType::kGetEnd, .request = request});
  Complete(copy->get, OkStatus());
  Advance();
}

void LocalEndpoint::SendFrame(const Frame& frame, std::span<const std::byte> payload,
                              std::shared_ptr<memory::MemoryRegion> region) {
  std::vector<std::byte> bytes(kFrameBytes + payload.size());
  EncodeFrame(frame, std::span(bytes).first<kFrameBytes>());
  std::copy(payload.begin(), payload.end(), bytes.begin() + kFrameBytes);
  stream_->Send(std::move(bytes), std::move(region));
}

void LocalEndpoint::FailSession(const Status& why, const char* cause) {
  if (why_.has_value()) return;
  why_ = why;
  open_ = false;
  core_->CountClose(cause);
  stream_->Close();  // before `serving_`: see OnCopied
  timer_.cancel();
  serving_.clear();
  for (auto& [request, copy] : copying_) copy->stop = true;
  auto asked = std::exchange(asked_, {});
  for (auto& [request, operation] : asked) End(operation, EndOf(operation.get));
  auto waiting = std::exchange(waiting_, {});
  for (Operation& operation : waiting) End(operation, EndOf(operation.get));
  Settle();
}

// Posted: what was posted before the end was noticed still waits for the loop, and completes first.
void LocalEndpoint::Settle() {
  core_->loop.Post([self = shared_from_this()] {
    if (self->settled_ || !self->copying_.empty()) return;
    self->settled_ = true;
    self->regions_.clear();
    self->core_->handler->OnClosed(self, *self->why_);
    self->core_->Remove(*self);
  });
}

}  // namespace weightwire::transport
