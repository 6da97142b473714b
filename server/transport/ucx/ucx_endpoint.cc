#include "server/transport/ucx/ucx_endpoint.h"

#include <algorithm>
#include <utility>

#include "server/transport/spans.h"

namespace weightwire::transport {
void UcxEndpoint::Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                      std::shared_ptr<void> hold, GetDone done) {
  for (const MutableSpan& span : into) WW_CHECK(core_->gpu_direct() || !span.on_device());
  auto operation = std::make_shared<GetOperation>(
      MakeGet(key, offset, std::move(into), timeout, std::move(hold), std::move(done)));
  core_->Post([self = shared_from_this(), operation] { self->Begin(std::move(*operation)); });
}

void UcxEndpoint::Begin(GetOperation operation) {
  // While there is `proved_`, the Get is the self-test's.
  const Status can = CheckGetBytes(operation.bytes, core_->options.chunk_bytes_max);
  if (!proved_ && !can.ok()) return Complete(operation, can);
  if (state_ == State::kSettled) return Complete(operation, why_);
  deadlines_.insert(operation.deadline);
  if (operation.deadline < armed_) {
    armed_ = operation.deadline;
    ArmTimer();
  }
  waiting_.push_back(std::move(operation));
  Advance();
}

void UcxEndpoint::Advance() {
  const uint32_t limit = std::min(core_->options.gets_in_flight_max, kUcxRequestsMax);
  while (state_ == State::kOpen && !waiting_.empty() && active_.size() < limit) {
    const uint64_t request = next_request_++;
    const GetOperation& operation =
        active_.emplace(request, Active{std::move(waiting_.front())}).first->second.operation;
    waiting_.pop_front();
    Send({.type = FrameType::kGet,
          .request = request,
          .key = operation.key,
          .offset = operation.offset,
          .length = operation.bytes});
  }
}

void UcxEndpoint::Send(Frame frame, std::span<const std::byte> payload, bool report) {
  core_->worker().Send(connection_, EncodeUcxMessage(frame, payload), report);
}

Status UcxEndpoint::Notify(std::span<const std::byte> message) {
  if (message.size() > kNotifyBytesMax) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge, "a notify of over 64 bytes");
  }
  if (!open_) return TransportFailed("the session has ended");
  if (notifies_queued_.fetch_add(1) >= core_->options.notifies_queued_max) {
    --notifies_queued_;
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded, "the notify queue is full");
  }
  core_->Post(
      [self = shared_from_this(), bytes = std::vector<std::byte>(message.begin(), message.end())] {
        if (self->state_ != State::kOpen) return;
        self->Send({.type = FrameType::kNotify, .request = ++self->notifies_sent_}, bytes, true);
      });
  return OkStatus();
}

void UcxEndpoint::OnSent() { --notifies_queued_; }

void UcxEndpoint::Map(RegionKey, Nanos, MapDone done) {
  core_->Post([done = std::move(done)] {
    done(Fail(Code::kUnimplemented, Reason::kInvalidRequest, "ucx cannot map a peer's memory"));
  });
}

void UcxEndpoint::Close() {
  open_ = false;
  core_->Post([self = shared_from_this()] { self->Drain(); });
}

void UcxEndpoint::OnMessage(std::span<const std::byte> bytes) {
  if (state_ != State::kOpen && state_ != State::kDraining) return;
  auto message = DecodeUcxMessage(bytes);
  if (!message.has_value()) return Garbage(message.error().message());
  const Frame& frame = message->frame;
  switch (frame.type) {
    case FrameType::kGet:
      return OnGet(frame);
    case FrameType::kGetReply:
      return OnGetReply(*message);
    case FrameType::kNotify:
      return OnNotify(*message);
    case FrameType::kRegion:
      return OnRegion(*message);
    case FrameType::kRegionGone:
      if (!keys_.contains(frame.request)) return Garbage("the end of an unknown region");
      return Forget(frame.request);
    case FrameType::kGetEnd:
      if (grants_.erase(frame.request) == 0) return Garbage("the end of no Get");
      return CloseWhenDrained();
    case FrameType::kSelfTest:
    case FrameType::kSelfTestEnd:
      return OnSelfTest(frame);
    default:
      return Garbage("a frame of another transport");
  }
}

void UcxEndpoint::OnNotify(const UcxMessage& message) {
  // UCX promises no order where a message travels by several lanes.
  if (proved_ || message.payload.size() > kNotifyBytesMax ||
      message.frame.request != notifies_received_ + 1) {
    return Garbage("a notify too early, too long or out of order");
  }
  ++notifies_received_;
  if (state_ != State::kOpen) return;
  core_->handler->OnNotify(shared_from_this(), message.payload);
}

void UcxEndpoint::OnGet(const Frame& frame) {
  if (grants_.size() >= kUcxRequestsMax || grants_.contains(frame.request)) {
    return Garbage("too many requests, or one twice");
  }
  Frame reply{.type = FrameType::kGetReply, .request = frame.request};
  auto ranges = Grant(frame);
  if (ranges.has_value()) return Send(reply, *ranges);
  reply.code = ranges.error().code();
  reply.reason = ranges.error().reason();
  Send(reply);
}

Result<std::vector<std::byte>> UcxEndpoint::Grant(const Frame& frame) {
  if (state_ != State::kOpen) return Fail(TransportFailed("the session ends"));
  if (frame.length > core_->options.chunk_bytes_max && frame.key != core_->self_test_key) {
    return Fail(Code::kInvalidArgument, Reason::kMessageTooLarge, "more than a chunk");
  }
  WW_ASSIGN(auto exported, core_->exports.Use(frame.key));
  WW_ASSIGN(auto pieces, exported->Slice(frame.offset, frame.length));
  std::vector<UcxRange> ranges;
  for (const PieceRange& piece : pieces) {
    WW_ASSIGN(const uint64_t shown, ShowKey(*piece.region));
    ranges.push_back({shown, reinterpret_cast<uintptr_t>(piece.at().at), piece.bytes});
  }
  grants_.emplace(frame.request, std::move(exported));
  return EncodeUcxRanges(ranges);
}

Result<uint64_t> UcxEndpoint::ShowKey(const std::shared_ptr<memory::MemoryRegion>& region) {
  std::string failure;
  const UcxRegistered* known = core_->registry().Of(core_->worker(), region, failure);
  if (known == nullptr) return Fail(TransportFailed("UCX cannot register memory: " + failure));
  if (shown_.insert(known->id).second) {
    Send({.type = FrameType::kRegion, .request = known->id},
         std::as_bytes(std::span(known->memory.remote_key)));
  }
  return known->id;
}

void UcxEndpoint::OnRegionGone(uint64_t registered) {
  if (state_ != State::kOpen || shown_.erase(registered) == 0) return;
  Send({.type = FrameType::kRegionGone, .request = registered});
}

void UcxEndpoint::OnRegion(const UcxMessage& message) {
  void* key = core_->worker().ImportKey(connection_, message.payload);
  if (key == nullptr) return Garbage("a remote key that UCX refuses");
  if (!keys_.emplace(message.frame.request, key).second) {
    core_->worker().ReleaseKey(key);
    Garbage("a region told twice");
  }
}

void UcxEndpoint::Forget(uint64_t region) {
  auto key = keys_.find(region);
  core_->worker().ReleaseKey(key->second);
  keys_.erase(key);
}

void UcxEndpoint::OnGetReply(const UcxMessage& message) {
  auto get = active_.find(message.frame.request);
  if (get == active_.end() || get->second.reading) return Garbage("a reply to nothing");
  if (message.frame.code == Code::kOk && state_ == State::kDraining) {
    return Send({.type = FrameType::kGetEnd, .request = message.frame.request});
  }
  if (message.frame.code != Code::kOk) {
    return Finish(message.frame.request, StatusOf(message.frame));
  }
  auto ranges = DecodeUcxRanges(message.payload, get->second.operation.bytes);
  if (!ranges.has_value()) return Garbage(ranges.error().message());
  const bool known = std::all_of(ranges->begin(), ranges->end(), [this](const UcxRange& range) {
    return keys_.contains(range.region);
  });
  if (!known) return Garbage("a range of an unknown region");
  if (Status can = RegisterTargets(get->second.operation); !can.ok()) {
    Send({.type = FrameType::kGetEnd, .request = message.frame.request});
    return Finish(message.frame.request, std::move(can));
  }
  Read(message.frame.request, *ranges);
}

Status UcxEndpoint::RegisterTargets(const GetOperation& operation) {
  std::string failure;
  for (const MutableSpan& span : operation.into) {
    if (span.on_device() &&
        core_->registry().Of(core_->worker(), span.allocation(), failure) == nullptr) {
      return TransportFailed("UCX cannot register memory of " + span.allocation().device().name() +
                             ": " + failure);
    }
  }
  return OkStatus();
}

void UcxEndpoint::Read(uint64_t request, const std::vector<UcxRange>& ranges) {
  Active& get = active_.at(request);
  get.reading = true;
  auto range = ranges.begin();
  uint64_t done = 0;    // of *range
  std::string ignored;  // RegisterTargets came first
  for (MutableSpan into : get.operation.into) {
    const UcxMemory* registered =
        into.on_device()
            ? &core_->registry().Of(core_->worker(), into.allocation(), ignored)->memory
            : nullptr;
    while (!into.empty()) {
      const size_t bytes = std::min<uint64_t>(into.size(), range->bytes - done);
      ++get.reads;
      core_->worker().Read(connection_, keys_.at(range->region), range->address + done,
                           into.at().at, bytes, registered, request);
      into = into.subspan(bytes);
      done += bytes;
      if (done == range->bytes) {
        ++range;
        done = 0;
      }
    }
  }
}

void UcxEndpoint::OnRead(uint64_t request, const std::string& failure) {
  Active& get = active_.at(request);
  --get.reads;
  if (!failure.empty()) FailSession(TransportFailed("a read failed: " + failure), "broken");
  if (get.reads > 0 || state_ == State::kClosing) return;
  Send({.type = FrameType::kGetEnd, .request = request});
  Finish(request, OkStatus());
  CloseWhenDrained();
}

void UcxEndpoint::Finish(uint64_t request, Status status) {
  auto get = active_.find(request);
  GetOperation operation = std::move(get->second.operation);
  active_.erase(get);
  deadlines_.erase(deadlines_.find(operation.deadline));
  Advance();
  Complete(operation, std::move(status));
}

}  // namespace weightwire::transport
