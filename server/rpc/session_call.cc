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

void SessionCall::Heartbeat() {
  std::lock_guard lock(mutex_);
  if (writing_ || over_ || leaving_) return;
  writing_ = true;
  up_.mutable_heartbeat()->set_sequence(++sequence_);
  up_.mutable_heartbeat()->clear_token();
  if (auto token = token_ ? token_->Text() : shown_; token && *token != shown_) {
    shown_ = *token;
    up_.mutable_heartbeat()->set_token(std::move(*token));
  }
  StartWrite(&up_);
}

void SessionCall::Leave() {
  std::lock_guard lock(mutex_);
  if (over_ || std::exchange(leaving_, true)) return;
  if (!writing_) WriteGoodbye();
}

void SessionCall::WriteGoodbye() {
  said_goodbye_ = writing_ = true;
  up_.mutable_goodbye();
  StartWriteLast(&up_, grpc::WriteOptions());
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

void SessionCall::OnWriteDone(bool) {
  std::lock_guard lock(mutex_);
  writing_ = false;
  if (leaving_ && !said_goodbye_ && !over_) WriteGoodbye();
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
