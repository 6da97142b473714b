#include "server/transport/nccl/nccl_endpoint.h"

#include <algorithm>
#include <utility>

#include "server/transport/spans.h"

namespace weightwire::transport {

void NcclEndpoint::Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                       std::shared_ptr<void> hold, GetDone done) {
  GetOperation operation =
      MakeGet(key, offset, std::move(into), timeout, std::move(hold), std::move(done));
  Status refused = CheckGetBytes(operation.bytes, core_->options.sessions.chunk_bytes_max);
  std::shared_ptr<NcclReceiveLane> lane;
  if (refused.ok()) {
    const auto first =
        std::ranges::find_if(operation.into, [](const MutableSpan& span) { return !span.empty(); });
    lane = ReceiveLane(core_->LaneOf(first->at().device));
    if (lane == nullptr) refused = EndOf(operation);
  }
  if (lane != nullptr) return lane->Submit(std::move(operation));
  core_->Post([operation = std::make_shared<GetOperation>(std::move(operation)),
               why = std::move(refused)] { Complete(*operation, why); });
}

Status NcclEndpoint::Notify(std::span<const std::byte> message) {
  if (message.size() > kNotifyBytesMax) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge, "a notify of over 64 bytes");
  }
  return inner_->Notify(EncodeNotify(message));
}

void NcclEndpoint::Map(RegionKey, Nanos, MapDone done) {
  core_->Post([done = std::move(done)] {
    done(Fail(Code::kUnimplemented, Reason::kInvalidRequest, "nccl cannot map a peer's memory"));
  });
}

void NcclEndpoint::Open(Transport::ConnectDone done) {
  {
    std::lock_guard lock(mutex_);
    opened_ = std::move(done);
  }
  ReceiveLane(0);
}

std::shared_ptr<NcclReceiveLane> NcclEndpoint::ReceiveLane(uint32_t number) {
  std::lock_guard lock(mutex_);
  if (ended_) return nullptr;
  auto& lane = receiving_[number];
  if (lane != nullptr) return lane;
  lane = std::make_shared<NcclReceiveLane>(shared_from_this(), core_->GpuOf(number), number);
  ++lanes_;
  lane->Start();
  return lane;
}

void NcclEndpoint::OnMessage(std::span<const std::byte> bytes) {
  auto message = DecodeNcclMessage(bytes);
  Status status;
  if (!message) {
    status = message.error();
  } else if (auto* notify = std::get_if<NcclNotify>(&*message)) {
    std::lock_guard lock(mutex_);
    if (!told_ && early_.size() >= core_->options.sessions.notifies_queued_max) {
      status = Status(Code::kResourceExhausted, Reason::kLimitExceeded, "too many early notifies");
    } else if (!told_) {
      early_.push_back(std::move(*notify));
    } else if (!settled_) {
      core_->Post([self = shared_from_this(), bytes = std::move(*notify)] {
        self->core_->handler->OnNotify(self, bytes);
      });
    }
  } else if (const auto* form = std::get_if<NcclForm>(&*message)) {
    status = OnForm(*form);
  } else {
    status = OnRequest(std::get<NcclRequest>(*message));
  }
  if (!status.ok()) FailSession(std::move(status));
}

Status NcclEndpoint::OnForm(const NcclForm& form) {
  std::lock_guard lock(mutex_);
  if (ended_) return OkStatus();
  if (sending_.contains(form.lane)) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "a lane that is there");
  }
  auto lane = std::make_shared<NcclSendLane>(shared_from_this(), core_->GpuOf(form.lane), form);
  sending_.emplace(form.lane, lane);
  ++lanes_;
  lane->Start();
  return OkStatus();
}

Status NcclEndpoint::OnRequest(const NcclRequest& request) {
  std::shared_ptr<NcclReceiveLane> receiving;
  std::shared_ptr<NcclSendLane> sending;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = receiving_.find(request.lane); found != receiving_.end()) {
      receiving = found->second;
    }
    if (const auto found = sending_.find(request.lane); found != sending_.end()) {
      sending = found->second;
    }
    if (ended_) return OkStatus();
  }
  const bool asks = request.frame.type == FrameType::kGet;
  if (asks && sending != nullptr) return sending->OnRequest(request.frame);
  if (!asks && receiving != nullptr) return receiving->OnReply(request.frame);
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "a request on no lane");
}

void NcclEndpoint::OnLaneFormed() {
  std::lock_guard lock(mutex_);
  if (told_ || ended_) return;
  told_ = true;
  // Posted under the lock: what comes next is posted behind.
  core_->Post([self = shared_from_this(), opened = std::exchange(opened_, nullptr)] {
    if (opened) return opened(std::static_pointer_cast<Endpoint>(self));
    self->core_->handler->OnAccepted(self);
  });
  for (auto& notify : std::exchange(early_, {})) {
    core_->Post([self = shared_from_this(), bytes = std::move(notify)] {
      self->core_->handler->OnNotify(self, bytes);
    });
  }
}

void NcclEndpoint::FailSession(Status why) {
  Status status = TransportFailed("NCCL: " + why.message());
  if (End(std::move(status).Remedy(why.remedy()))) inner_->Close();
}

void NcclEndpoint::Expire() {
  {
    std::lock_guard lock(mutex_);
    if (!ended_) expired_at_ = SystemClock().Now();
  }
  if (End(TransportFailed("an operation outlived its deadline"))) inner_->Close();
}

Status NcclEndpoint::EndOf(const GetOperation& operation) {
  std::lock_guard lock(mutex_);
  return operation.deadline <= expired_at_ ? DeadlineExceeded() : why_;
}

bool NcclEndpoint::End(Status why) {
  std::vector<std::shared_ptr<NcclLane>> lanes;
  Transport::ConnectDone opened;
  {
    std::lock_guard lock(mutex_);
    if (ended_) return false;
    ended_ = true;
    why_ = std::move(why);
    for (const auto& [number, lane] : receiving_) lanes.push_back(lane);
    for (const auto& [number, lane] : sending_) lanes.push_back(lane);
    opened = std::exchange(opened_, nullptr);
  }
  for (const auto& lane : lanes) lane->Stop();
  if (opened) {
    core_->Post([self = shared_from_this(), opened] { opened(Fail(self->why_)); });
  }
  return true;
}

void NcclEndpoint::OnInnerClosed(const Status& why) {
  End(why);
  {
    std::lock_guard lock(mutex_);
    inner_closed_ = true;
  }
  MaybeSettle();
}

void NcclEndpoint::OnLaneEnded(std::shared_ptr<NcclLane> lane) {
  core_->Post([self = shared_from_this(), lane = std::move(lane)] {
    {
      std::lock_guard lock(self->mutex_);  // a lane is started under it
      --self->lanes_;
    }
    lane->Join();
    self->MaybeSettle();
  });
}

// Posted: completions and notifies that were posted before come first.
void NcclEndpoint::MaybeSettle() {
  {
    std::lock_guard lock(mutex_);
    if (settled_ || !inner_closed_ || lanes_ > 0) return;
    settled_ = true;
    receiving_.clear();
    sending_.clear();
  }
  core_->Post([self = shared_from_this()] {
    if (self->told_) self->core_->handler->OnClosed(self, self->why_);
    self->core_->Remove(self->inner_->id());
  });
}

}  // namespace weightwire::transport
