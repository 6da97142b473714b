#include "server/rpc/session_call.h"

#include <utility>

#include "server/wire/control.h"

namespace weightwire::rpc {

void SessionCall::Start(v1::Coordinator::Stub& stub, const control::AgentHello& hello) {
  if (!calls_->Begin(&context_)) return;
  self_ = shared_from_this();
  // Read before the metadata is: what comes in between is shown once too often, not never.
  if (token_) shown_ = token_->Text().value_or("");
  stub.async()->Session(&context_, this);
  *up_.mutable_hello() = wire::ToProto(hello);
  writing_ = true;
  AddHold();  // heartbeats are started outside of gRPC's own callbacks
  StartWrite(&up_);
  StartRead(&down_);
  StartCall();
}

void SessionCall::Heartbeat(const control::Beat& beat) {
  std::lock_guard lock(mutex_);
  if (leaving_ || (writing_ && up_.has_heartbeat())) return;
  beat_due_ = true;
  beat_ = beat;
  WriteNext();
}

void SessionCall::Report(v1::ReportRequest report, uint64_t number) {
  std::lock_guard lock(mutex_);
  if (leaving_) return;
  reports_.Add(std::move(report), number);
  WriteNext();
}

void SessionCall::Leave() {
  std::lock_guard lock(mutex_);
  leaving_ = true;
  WriteNext();
}

void SessionCall::WriteNext() {
  if (writing_ || over_ || said_goodbye_) return;
  if (std::exchange(beat_due_, false)) {
    FillHeartbeat();
  } else if (!reports_.empty()) {
    reports_.Next(up_.mutable_reports());
  } else if (leaving_) {
    said_goodbye_ = writing_ = true;
    up_.mutable_goodbye();
    return StartWriteLast(&up_, grpc::WriteOptions());
  } else {
    return;
  }
  writing_ = true;
  StartWrite(&up_);
}

void SessionCall::FillHeartbeat() {
  up_.mutable_heartbeat()->set_sequence(++sequence_);
  wire::SetBeat(beat_, up_.mutable_heartbeat());
  up_.mutable_heartbeat()->clear_token();
  if (auto token = token_ ? token_->Text() : shown_; token && *token != shown_) {
    shown_ = *token;
    up_.mutable_heartbeat()->set_token(std::move(*token));
  }
}

bool SessionCall::WaitUntilOver(Nanos span) {
  std::unique_lock lock(mutex_);
  return done_changed_.wait_for(lock, span, [this] { return done_; });
}

void SessionCall::Stop() {
  context_.TryCancel();
  LetGo();
}

void SessionCall::LetGo() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(over_, true) || !self_) return;
  }
  RemoveHold();
}

void SessionCall::OnWriteDone(bool ok) {
  std::lock_guard lock(mutex_);
  writing_ = !ok;  // nothing more is written to a stream that broke
  WriteNext();
}

void SessionCall::OnReadDone(bool ok) {
  if (!ok) return LetGo();
  calls_->Post([self = shared_from_this(), down = std::move(down_)] { self->events_.down(down); });
  down_ = {};
  StartRead(&down_);
}

void SessionCall::OnDone(const grpc::Status& status) {
  const auto self = std::move(self_);
  {
    std::lock_guard lock(mutex_);
    done_ = true;
  }
  done_changed_.notify_all();
  calls_->End(&context_, [self, failure = FromGrpc(status)] { self->events_.ended(failure); });
}

}  // namespace weightwire::rpc
