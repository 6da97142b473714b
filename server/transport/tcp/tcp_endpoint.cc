#include "server/transport/tcp/tcp_endpoint.h"

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <utility>

#include "server/transport/spans.h"

namespace weightwire::transport {

TcpEndpoint::TcpEndpoint(std::shared_ptr<TcpCore> core, const Hello& hello,
                         std::vector<std::shared_ptr<TcpConnection>> connections)
    : core_(std::move(core)),
      hello_(hello),
      connections_(std::move(connections)),
      timer_(connections_.front()->loop().context()),
      outstanding_bytes_(connections_.size()),
      connections_open_(connections_.size()) {}

void TcpEndpoint::Start(Task announce) {
  for (size_t i = 0; i < connections_.size(); ++i) connections_[i]->Bind(shared_from_this(), i);
  // Under the lock, so that a Close that finds us in the core comes after `announce` is posted.
  std::lock_guard lock(mutex_);
  core_->Add(shared_from_this());
  connections_.front()->loop().Post([self = shared_from_this(), announce = std::move(announce)] {
    announce();
    for (const auto& connection : self->connections_) {
      connection->loop().Post([connection] { connection->Start(); });
    }
  });
}

void TcpEndpoint::GetThrough(RegionKey key, uint64_t offset, std::vector<MutableSpan> into,
                             Nanos timeout, std::shared_ptr<void> hold, Take take, GetDone done) {
  GetOperation operation = MakeGet(key, offset, std::move(into), timeout, std::move(hold),
                                   std::move(done), std::move(take));
  auto refuse = [this, &operation](Status why) {
    connections_.front()->loop().Post(
        [refused = std::make_shared<GetOperation>(std::move(operation)), why = std::move(why)] {
          Complete(*refused, why);
        });
  };
  if (Status can = CheckGetBytes(operation.bytes, core_->options.chunk_bytes_max); !can.ok()) {
    return refuse(std::move(can));
  }
  std::unique_lock lock(mutex_);
  if (state_ == State::kSettled) {
    const Status why = why_;
    lock.unlock();
    return refuse(why);
  }
  deadlines_.insert(operation.deadline);
  if (operation.deadline < armed_ && state_ == State::kOpen) {
    armed_ = operation.deadline;
    connections_.front()->loop().Post([self = shared_from_this()] { self->ArmTimer(); });
  }
  waiting_.push_back(std::move(operation));
  AdvanceLocked();
}

void TcpEndpoint::AdvanceLocked() {
  const uint32_t limit = std::min(core_->options.gets_in_flight_max, kTcpRequestsMax);
  while (state_ == State::kOpen && !waiting_.empty() && in_flight_ < limit) {
    const auto least = std::min_element(outstanding_bytes_.begin(), outstanding_bytes_.end());
    const auto index = static_cast<size_t>(least - outstanding_bytes_.begin());
    *least += waiting_.front().bytes;
    ++in_flight_;
    // Posted under the lock, so that it precedes the Shut that a Close posts.
    const auto& connection = connections_[index];
    connection->loop().Post(
        [connection, operation = std::make_shared<GetOperation>(std::move(waiting_.front()))] {
          connection->StartGet(std::move(*operation));
        });
    waiting_.pop_front();
  }
}

void TcpEndpoint::Finish(size_t connection, GetOperation operation, Status status) {
  {
    std::lock_guard lock(mutex_);
    outstanding_bytes_[connection] -= operation.bytes;
    --in_flight_;
    deadlines_.erase(deadlines_.find(operation.deadline));
    AdvanceLocked();
  }
  Complete(operation, std::move(status));
}

Status TcpEndpoint::Notify(std::span<const std::byte> message) {
  if (const size_t most = core_->options.notify_bytes_max; message.size() > most) {
    return Status(Code::kInvalidArgument, Reason::kMessageTooLarge,
                  "a notify of over " + std::to_string(most) + " bytes");
  }
  std::lock_guard lock(mutex_);
  if (state_ != State::kOpen) return TransportFailed("the session has ended");
  const bool bounded = core_->options.bounds == nullptr || core_->options.bounds(message);
  if (bounded && notifies_queued_ >= core_->options.notifies_queued_max) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded, "the notify queue is full");
  }
  if (bounded) ++notifies_queued_;
  const auto& connection = connections_.front();
  connection->loop().Post(
      [connection, bounded, bytes = std::vector<std::byte>(message.begin(), message.end())] {
        connection->SendNotify(bytes, bounded);
      });
  return OkStatus();
}

void TcpEndpoint::NotifySent() {
  std::lock_guard lock(mutex_);
  --notifies_queued_;
}

void TcpEndpoint::DeliverNotify(std::span<const std::byte> message) {
  core_->handler->OnNotify(shared_from_this(), message);
}

void TcpEndpoint::Map(RegionKey, Nanos, MapDone done) {
  connections_.front()->loop().Post([done = std::move(done)] {
    done(Fail(Code::kUnimplemented, Reason::kInvalidRequest, "tcp cannot map a peer's memory"));
  });
}

void TcpEndpoint::Close() { FailSession(ClosedHere(), "closed_here"); }

void TcpEndpoint::FailSession(Status why, const char* cause) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kOpen) return;
  state_ = State::kClosing;
  why_ = std::move(why);
  core_->CountClose(cause);
  for (const auto& connection : connections_) {
    connection->loop().Post([connection] { connection->Shut(); });
  }
}

Status TcpEndpoint::EndOf(const GetOperation& operation) {
  std::lock_guard lock(mutex_);
  return operation.deadline <= expired_at_ ? DeadlineExceeded() : why_;
}

void TcpEndpoint::ConnectionShut() {
  std::lock_guard lock(mutex_);
  if (--connections_open_ > 0) return;
  connections_.front()->loop().Post([self = shared_from_this()] { self->Settle(); });
}

void TcpEndpoint::Settle() {
  timer_.cancel();
  std::deque<GetOperation> waiting;
  {
    std::lock_guard lock(mutex_);
    state_ = State::kSettled;
    waiting.swap(waiting_);
    deadlines_.clear();
  }
  for (GetOperation& operation : waiting) Complete(operation, EndOf(operation));
  core_->handler->OnClosed(shared_from_this(), why_);
  core_->Remove(id());
}

void TcpEndpoint::ArmTimer() {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kOpen || armed_ == Nanos::max()) return;
    timer_.expires_at(std::chrono::steady_clock::time_point(armed_));
  }
  timer_.async_wait([self = shared_from_this()](const boost::system::error_code& error) {
    if (!error) self->OnTimer();
  });
}

void TcpEndpoint::OnTimer() {
  const Nanos now = SystemClock().Now();
  bool expired = false;
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kOpen) return;
    expired = !deadlines_.empty() && *deadlines_.begin() <= now;
    if (expired) expired_at_ = now;
    armed_ = deadlines_.empty() ? Nanos::max() : *deadlines_.begin();
  }
  if (expired) {
    FailSession(TransportFailed("an operation outlived its deadline"), "deadline");
  } else {
    ArmTimer();
  }
}

}  // namespace weightwire::transport
