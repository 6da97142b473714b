// How a session begins and ends. The self-test's deadline is one of the session's.
#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <utility>

#include "server/transport/ucx/ucx_endpoint.h"

namespace weightwire::transport {
namespace {

/// How long a Close waits for what is under way.
constexpr auto kDrainLimit = std::chrono::milliseconds(500);

std::string Joined(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ",") + word;
  return out.empty() ? "unknown" : out;
}

}  // namespace

UcxEndpoint::UcxEndpoint(std::shared_ptr<UcxCore> core, const Hello& hello, uint64_t connection,
                         Incarnation peer, std::string peer_name)
    : core_(std::move(core)),
      hello_(hello),
      connection_(connection),
      peer_name_(std::move(peer_name)),
      self_test_({.send = [this](const Frame& frame) { Send(frame); },
                  .get =
                      [this](RegionKey key, MutableSpan into, GetDone done) {
                        GetOperation operation;
                        operation.key = key;
                        operation.bytes = into.size();
                        operation.into = {into};
                        operation.deadline = proof_deadline_;
                        operation.done = [this, done = std::move(done)](Status status) {
                          if (state_ != State::kOpen) return;
                          lanes_ = core_->worker().Lanes(connection_);
                          done(std::move(status));
                        };
                        Begin(std::move(operation));
                      },
                  .ended = [this](bool passed) { OnSelfTestEnd(passed); }},
                 peer, core_->self_test_key),
      timer_(core_->loop.context()) {}

void UcxEndpoint::Start(Nanos deadline, Transport::ConnectDone proved) {
  proved_ = std::move(proved);
  proof_deadline_ = deadline;
  core_->Bind(connection_, shared_from_this());
  core_->SessionOpened();
  deadlines_.insert(proof_deadline_);
  armed_ = proof_deadline_;
  ArmTimer();
  self_test_.Start();
}

void UcxEndpoint::OnSelfTest(const Frame& frame) {
  if (state_ != State::kOpen) return;
  if (!proved_ || !self_test_.OnFrame(frame)) Garbage("a self-test out of place");
}

void UcxEndpoint::OnSelfTestEnd(bool passed) {
  if (!passed) return FailSession(TransportFailed(self_test_.Words()), "self_test");
  deadlines_.erase(deadlines_.find(proof_deadline_));
  core_->SessionProved(Joined(lanes_), self_test_.bytes_per_second());
  std::exchange(proved_, nullptr)(std::shared_ptr<Endpoint>(shared_from_this()));
}

Status UcxEndpoint::SelfTestFailure() const {
  if (why_.code() == Code::kCancelled) return why_;
  const bool late = why_.code() == Code::kDeadlineExceeded && !self_test_.failed();
  core_->CountSelfTest(late ? "timeout" : self_test_.cause());
  Status why = late ? why_ : TransportFailed("");
  return Status(why.code(), why.reason(),
                "the self-test of ucx with " + peer_name_ + " over " + Joined(lanes_) +
                    " failed: " + (self_test_.failed() ? self_test_.Words() : why_.message()))
      .Remedy(
          "compare `ucx_info -d` of both hosts and set ucx_tls or ucx_devices to what reaches "
          "the peer, or leave ucx out of `transports`");
}

void UcxEndpoint::OnBroken(const std::string& why) {
  FailSession(TransportFailed("the connection broke: " + why), "broken");
}

void UcxEndpoint::Garbage(const std::string& what) {
  FailSession(TransportFailed("the peer sent garbage: " + what), "garbage");
}

void UcxEndpoint::Drain() {
  if (state_ != State::kOpen) return;
  state_ = State::kDraining;
  open_ = false;
  why_ = ClosedHere();
  core_->CountClose("closed_here");
  timer_.expires_after(kDrainLimit);
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    self->core_->Post([self] { self->CloseNow(); });
  });
  CloseWhenDrained();
}

void UcxEndpoint::CloseWhenDrained() {
  if (state_ != State::kDraining || !grants_.empty()) return;
  const bool reading = std::any_of(active_.begin(), active_.end(),
                                   [](const auto& entry) { return entry.second.reads > 0; });
  if (!reading) CloseNow();
}

void UcxEndpoint::FailSession(Status why, const char* cause) {
  if (state_ == State::kOpen) {
    open_ = false;
    why_ = std::move(why);
    core_->CountClose(cause);
  }
  CloseNow();
}

void UcxEndpoint::CloseNow() {
  if (state_ == State::kClosing || state_ == State::kSettled) return;
  state_ = State::kClosing;
  timer_.cancel();
  core_->worker().Close(connection_);
}

Status UcxEndpoint::EndOf(const GetOperation& operation) const {
  return operation.deadline <= expired_at_ ? DeadlineExceeded() : why_;
}

void UcxEndpoint::OnClosed() {
  for (const auto& [region, key] : std::exchange(keys_, {})) core_->worker().ReleaseKey(key);
  grants_.clear();
  // Gets that were posted before the end was noticed still wait for the loop, and complete first.
  core_->Post([self = shared_from_this()] { self->Settle(); });
}

void UcxEndpoint::Settle() {
  state_ = State::kSettled;
  deadlines_.clear();
  for (auto& [request, get] : std::exchange(active_, {})) {
    Complete(get.operation, EndOf(get.operation));
  }
  for (GetOperation& operation : std::exchange(waiting_, {})) {
    Complete(operation, EndOf(operation));
  }
  core_->SessionClosed();
  if (proved_) return std::exchange(proved_, nullptr)(Fail(SelfTestFailure()));
  core_->SessionLeft(Joined(lanes_));
  core_->handler->OnClosed(shared_from_this(), why_);
}

void UcxEndpoint::ArmTimer() {
  if (state_ != State::kOpen || armed_ == Nanos::max()) return;
  timer_.expires_at(std::chrono::steady_clock::time_point(armed_));
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& cancelled) {
    if (cancelled) return;
    self->core_->Post([self] { self->OnTimer(); });
  });
}

void UcxEndpoint::OnTimer() {
  if (state_ != State::kOpen) return;
  const Nanos now = SystemClock().Now();
  armed_ = deadlines_.empty() ? Nanos::max() : *deadlines_.begin();
  if (armed_ > now) return ArmTimer();
  expired_at_ = now;
  if (proved_) {
    lanes_ = core_->worker().Lanes(connection_);
    return FailSession(
        Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, self_test_.Words() + " in time"),
        "self_test");
  }
  FailSession(TransportFailed("an operation outlived its deadline"), "deadline");
}

}  // namespace weightwire::transport
