#include "server/transport/nccl/nccl_lane.h"

#include <algorithm>
#include <array>
#include <utility>

#include "server/transport/nccl/nccl_endpoint.h"
#include "server/transport/spans.h"

namespace weightwire::transport {
namespace {

/// Requests that a peer may have open on one lane; more is an offence.
constexpr size_t kRequestsMax = 256;
constexpr size_t kPatternBytes = 4096;
constexpr std::chrono::milliseconds kAbortAgain(20);

/// What a lane carries first, so that a session is not handed out over one that carries nothing, or
/// something else.
std::array<std::byte, kPatternBytes> Pattern(uint32_t lane) {
  std::array<std::byte, kPatternBytes> bytes{};
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((i * 131 + i / 256 + lane * 17 + 7) & 0xff);
  }
  return bytes;
}

Nanos Left(Nanos deadline) { return std::max(deadline - SystemClock().Now(), Nanos(0)); }

Status Garbage(const char* what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, what);
}

/// Ranges of [offset, offset + bytes) of `spans`, with as many bytes of `buffer`.
void Scatter(const std::vector<MutableSpan>& spans, uint64_t offset, uint64_t bytes,
             device::ConstBytes buffer, std::vector<NcclRun>& runs) {
  for (const MutableSpan& span : spans) {
    if (bytes == 0) return;
    if (offset >= span.size()) {
      offset -= span.size();
      continue;
    }
    const uint64_t some = std::min<uint64_t>(span.size() - offset, bytes);
    runs.push_back({span.at() + offset, buffer, some});
    buffer = buffer + some;
    bytes -= some;
    offset = 0;
  }
}

}  // namespace

NcclLane::NcclLane(std::shared_ptr<NcclEndpoint> endpoint, NcclCore::Gpu& gpu, uint32_t number)
    : endpoint_(std::move(endpoint)), gpu_(gpu), number_(number) {}

NcclCore& NcclLane::core() const { return endpoint_->core(); }

void NcclLane::Start() {
  thread_ = std::thread([self = shared_from_this()] { self->Run(); });
}

void NcclLane::Stop() {
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  stopping_ = true;
  changed_.notify_all();
  core().PostSlow(Nanos(0), [self = shared_from_this()] { self->AbortOn(); });
}

void NcclLane::AbortOn() {
  std::shared_ptr<NcclPair> pair;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return;
    pair = pair_;
  }
  if (pair != nullptr) pair->Abort("the session has ended");
  core().PostSlow(kAbortAgain, [self = shared_from_this()] { self->AbortOn(); });
}

void NcclLane::Run() {
  Status status = core().stuck();
  if (status.ok()) {
    auto opened = NcclPair::Open(*core().library, *gpu_.device);
    if (opened) {
      std::lock_guard lock(mutex_);
      pair_ = std::move(*opened);
    } else {
      status = opened.error();
    }
  }
  const std::shared_ptr<NcclPair> pair = pair_;  // of this thread only, but for AbortOn
  if (status.ok() && !stopping()) status = Form(*pair);
  if (status.ok() && !stopping()) {
    endpoint_->OnLaneFormed();
    status = Serve(*pair);
  }
  if (!status.ok() && !stopping()) endpoint_->FailSession(std::move(status));
  Drain();
  {
    std::lock_guard lock(mutex_);
    ended_ = stopping_ = true;
    pair_ = nullptr;
  }
  if (pair != nullptr && pair->stuck()) core().SetStuck("its peer was lost");
  endpoint_->OnLaneEnded(shared_from_this());
}

void NcclReceiveLane::Submit(GetOperation operation) {
  std::unique_lock lock(mutex_);
  if (drained_) {
    lock.unlock();
    const Status why = endpoint_->EndOf(operation);
    return Complete(std::move(operation), why);
  }
  deadlines_.insert(operation.deadline);
  waiting_.push_back(std::move(operation));
  AdvanceLocked();
  ArmLocked();
}

// Whatever the lane's thread waits for then: that it forms, a buffer, NCCL.
void NcclReceiveLane::ArmLocked() {
  if (deadlines_.empty() || *deadlines_.begin() >= armed_) return;
  armed_ = *deadlines_.begin();
  core().PostAfter(Left(armed_), [lane = weak_from_this()] {
    const auto self = std::static_pointer_cast<NcclReceiveLane>(lane.lock());
    if (self != nullptr) self->OnTimer();
  });
}

void NcclReceiveLane::OnTimer() {
  {
    std::lock_guard lock(mutex_);
    armed_ = Nanos::max();
    if (deadlines_.empty()) return;
    if (SystemClock().Now() < *deadlines_.begin()) return ArmLocked();
  }
  endpoint_->Expire();
}

void NcclReceiveLane::AdvanceLocked() {
  const size_t most = std::min<size_t>(core().options.sessions.gets_in_flight_max, kRequestsMax);
  while (announced_ && !stopping() && !waiting_.empty() && asked_.size() < most) {
    const uint64_t request = next_request_++;
    const GetOperation& get = waiting_.front();
    const Frame frame{.type = FrameType::kGet,
                      .request = request,
                      .key = get.key,
                      .offset = get.offset,
                      .length = get.bytes};
    // A failure is the session's end, which ends the lane.
    static_cast<void>(endpoint_->Tell(Encode(NcclRequest{number_, frame})));
    asked_.emplace(request, Asked{std::move(waiting_.front())});
    waiting_.pop_front();
  }
}

Status NcclReceiveLane::OnReply(const Frame& frame) {
  std::unique_lock lock(mutex_);
  if (drained_) return OkStatus();
  const auto entry = asked_.find(frame.request);
  if (entry == asked_.end()) return Garbage("a reply to nothing");
  Asked& asked = entry->second;
  if (frame.code != Code::kOk) {
    if (asked.announced != 0) return Garbage("a refusal of what is being sent");
    deadlines_.erase(deadlines_.find(asked.get.deadline));
    GetOperation refused = std::move(asked.get);
    asked_.erase(entry);
    AdvanceLocked();
    lock.unlock();
    Complete(std::move(refused), StatusOf(frame));
    return OkStatus();
  }
  uint64_t in_round = frame.length;
  for (const Part& part : announcing_) in_round += part.bytes;
  if (frame.length == 0 || frame.length > asked.get.bytes - asked.announced ||
      in_round > gpu_.receiving.bytes()) {
    return Garbage("a round of impossible lengths");
  }
  asked.announced += frame.length;
  announcing_.push_back({frame.request, frame.length});
  if (frame.offset == 0) return OkStatus();
  rounds_.push_back(std::exchange(announcing_, {}));
  changed_.notify_all();
  return OkStatus();
}

Status NcclReceiveLane::Form(NcclPair& pair) {
  const Nanos deadline = DeadlineAfter(core().options.form_timeout);
  NcclForm form{number_, gpu_.receiving.bytes(), {}};
  WW_ASSIGN_OR_STATUS(form.unique_id, pair.MakeUniqueId());
  {
    std::lock_guard lock(mutex_);
    WW_RETURN_IF_ERROR(endpoint_->Tell(Encode(form)));
    announced_ = true;
    AdvanceLocked();
  }
  WW_RETURN_IF_ERROR(pair.Form(form.unique_id, 0, Left(deadline)));
  WW_ASSIGN_OR_STATUS(auto buffer, gpu_.receiving.Borrow(deadline, stopping_));
  const Status received = pair.Receive(buffer.at(), kPatternBytes, Left(deadline));
  if (pair.stuck()) buffer.Abandon();
  WW_RETURN_IF_ERROR(received);
  std::array<std::byte, kPatternBytes> seen{};
  WW_RETURN_IF_ERROR(device::CopyRun({seen.data()}, {buffer.at(), gpu_.device.get()}, seen.size()));
  if (seen == Pattern(number_)) return OkStatus();
  return Status(Code::kUnavailable, Reason::kTransportFailed,
                "a pattern that the peer sent over NCCL came as something else");
}

Status NcclReceiveLane::Serve(NcclPair& pair) {
  for (;;) {
    Round round;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping() || !rounds_.empty(); });
      if (stopping()) return OkStatus();
      round = std::move(rounds_.front());
      rounds_.pop_front();
    }
    WW_RETURN_IF_ERROR(Receive(pair, round));
  }
}

Status NcclReceiveLane::Receive(NcclPair& pair, const Round& round) {
  // A bound for the worst case: what was asked for has deadlines of its own.
  const Nanos deadline = DeadlineAfter(core().options.exchange_timeout);
  WW_ASSIGN_OR_STATUS(auto buffer, gpu_.receiving.Borrow(deadline, stopping_));
  uint64_t bytes = 0;
  for (const Part& part : round) bytes += part.bytes;
  const Status received = pair.Receive(buffer.at(), bytes, Left(deadline));
  if (pair.stuck()) buffer.Abandon();
  WW_RETURN_IF_ERROR(received);

  std::vector<NcclRun> runs;
  device::ConstBytes at(buffer.at(), gpu_.device.get());
  std::vector<GetOperation> done;
  {
    // What was asked for stays where it is: only this thread takes it away, but for refusals.
    std::lock_guard lock(mutex_);
    for (const Part& part : round) {
      Asked& asked = asked_.at(part.request);
      Scatter(asked.get.into, asked.arrived, part.bytes, at, runs);
      asked.arrived += part.bytes;
      at = at + part.bytes;
    }
  }
  WW_RETURN_IF_ERROR(CopyRuns(runs));
  {
    std::lock_guard lock(mutex_);
    for (const Part& part : round) {
      const auto entry = asked_.find(part.request);
      if (entry == asked_.end() || entry->second.arrived < entry->second.get.bytes) continue;
      deadlines_.erase(deadlines_.find(entry->second.get.deadline));
      done.push_back(std::move(entry->second.get));
      asked_.erase(entry);
    }
    AdvanceLocked();
  }
  for (GetOperation& get : done) Complete(std::move(get), OkStatus());
  return OkStatus();
}

void NcclReceiveLane::Complete(GetOperation operation, Status status) {
  core().Post([operation = std::make_shared<GetOperation>(std::move(operation)),
               status = std::move(status)] { transport::Complete(*operation, status); });
}

void NcclReceiveLane::Drain() {
  std::vector<GetOperation> left;
  {
    std::lock_guard lock(mutex_);
    drained_ = true;
    for (auto& [request, asked] : asked_) left.push_back(std::move(asked.get));
    for (GetOperation& get : waiting_) left.push_back(std::move(get));
    asked_.clear();
    waiting_.clear();
    deadlines_.clear();
  }
  for (GetOperation& get : left) {
    const Status why = endpoint_->EndOf(get);
    Complete(std::move(get), why);
  }
}

Status NcclSendLane::OnRequest(const Frame& frame) {
  std::lock_guard lock(mutex_);
  if (requests_.size() >= kRequestsMax) return Garbage("too many requests");
  requests_.push_back(frame);
  changed_.notify_all();
  return OkStatus();
}

Status NcclSendLane::Form(NcclPair& pair) {
  const Nanos deadline = DeadlineAfter(core().options.form_timeout);
  WW_RETURN_IF_ERROR(pair.Form(form_.unique_id, 1, Left(deadline)));
  WW_ASSIGN_OR_STATUS(auto buffer, gpu_.sending.Borrow(deadline, stopping_));
  const auto pattern = Pattern(number_);
  WW_RETURN_IF_ERROR(
      device::CopyRun({buffer.at(), gpu_.device.get()}, pattern.data(), pattern.size()));
  const Status sent = pair.Send(buffer.at(), pattern.size(), Left(deadline));
  if (pair.stuck()) buffer.Abandon();
  return sent;
}

Status NcclSendLane::Serve(NcclPair& pair) {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping() || !requests_.empty() || !wanted_.empty(); });
      if (stopping()) return OkStatus();
      for (const Frame& frame : std::exchange(requests_, {})) wanted_.push_back({frame, nullptr});
    }
    if (wanted_.size() > kRequestsMax) return Garbage("too many requests");
    WW_RETURN_IF_ERROR(Send(pair));
  }
}

// One round of as many requests as fit.
Status NcclSendLane::Send(NcclPair& pair) {
  const Nanos deadline = DeadlineAfter(core().options.exchange_timeout);
  WW_ASSIGN_OR_STATUS(auto buffer, gpu_.sending.Borrow(deadline, stopping_));
  const uint64_t most = std::min(buffer.buffers->bytes(), form_.buffer_bytes);
  std::vector<NcclRun> runs;
  std::vector<Frame> replies;
  std::vector<std::shared_ptr<const Exported>> held;  // until their bytes are in the buffer
  uint64_t bytes = 0;
  while (!wanted_.empty() && bytes < most) {
    Wanted& wanted = wanted_.front();
    if (wanted.exported == nullptr) {
      Status why;
      if (wanted.frame.length > core().options.sessions.chunk_bytes_max) {
        why = Status(Code::kInvalidArgument, Reason::kMessageTooLarge, "");
      } else if (auto used = core().exports().Use(wanted.frame.key); !used) {
        why = used.error();
      } else if (auto all = (*used)->Slice(wanted.frame.offset, wanted.frame.length); !all) {
        why = all.error();
      } else {
        wanted.exported = std::move(*used);
      }
      if (!why.ok()) {
        WW_RETURN_IF_ERROR(Reply({.type = FrameType::kGetReply,
                                  .code = why.code(),
                                  .reason = why.reason(),
                                  .request = wanted.frame.request}));
        wanted_.pop_front();
        continue;
      }
    }
    const uint64_t some = std::min(wanted.frame.length - wanted.sent, most - bytes);
    WW_ASSIGN_OR_STATUS(const auto ranges,
                        wanted.exported->Slice(wanted.frame.offset + wanted.sent, some));
    for (const PieceRange& range : ranges) {
      runs.push_back({{buffer.at() + bytes, gpu_.device.get()}, range.at(), range.bytes});
      bytes += range.bytes;
    }
    replies.push_back(
        {.type = FrameType::kGetReply, .request = wanted.frame.request, .length = some});
    held.push_back(wanted.exported);
    wanted.sent += some;
    if (wanted.sent == wanted.frame.length) wanted_.pop_front();
  }
  if (replies.empty()) return OkStatus();
  WW_RETURN_IF_ERROR(CopyRuns(runs));
  held.clear();
  replies.back().offset = 1;
  for (const Frame& reply : replies) WW_RETURN_IF_ERROR(Reply(reply));
  const Status sent = pair.Send(buffer.at(), bytes, Left(deadline));
  if (pair.stuck()) buffer.Abandon();
  return sent;
}

Status NcclSendLane::Reply(const Frame& frame) {
  return endpoint_->Tell(Encode(NcclRequest{number_, frame}));
}

}  // namespace weightwire::transport
