#pragma once

#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "server/transport/operation.h"
#include "server/transport/tcp/tcp_connection.h"
#include "server/transport/tcp/tcp_core.h"

namespace weightwire::transport {

/// One session over several sockets. Gets go to the socket with the fewest bytes outstanding,
/// notifies over socket 0. The loop of socket 0 is the session's home: handler calls run there.
///
/// States: open → closing (Close, a broken socket, a deadline) → settled. Closing posts Shut to
/// each socket's loop; the last one posts Settle home, which completes what was never sent and then
/// calls OnClosed.
class TcpEndpoint final : public Endpoint, public std::enable_shared_from_this<TcpEndpoint> {
 public:
  TcpEndpoint(std::shared_ptr<TcpCore> core, const Hello& hello,
              std::vector<std::shared_ptr<TcpConnection>> connections);
  /// Runs `announce` at home, then starts to read.
  void Start(Task announce);

  const Hello& hello() const override { return hello_; }
  const std::string& transport_name() const override { return core_->name; }
  void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
           std::shared_ptr<void> hold, GetDone done) override {
    GetThrough(key, offset, std::move(into), timeout, std::move(hold), nullptr, std::move(done));
  }
  void GetThrough(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                  std::shared_ptr<void> hold, Take take, GetDone done) override;
  Status Notify(std::span<const std::byte> message) override;
  void Map(RegionKey key, Nanos timeout, MapDone done) override;
  void Close() override;

  // Called by the connections, on their loops.
  void DeliverNotify(std::span<const std::byte> message);
  void NotifySent();
  /// A socket is done with `operation`; completes it and sends the next one.
  void Finish(size_t connection, GetOperation operation, Status status);
  /// `cause`: a metric label from a closed set.
  void FailSession(Status why, const char* cause);
  /// What an operation hears that the end of the session caught.
  Status EndOf(const GetOperation& operation);
  void ConnectionShut();

 private:
  enum class State { kOpen, kClosing, kSettled };

  void AdvanceLocked();
  void ArmTimer();
  void OnTimer();
  void Settle();

  const std::shared_ptr<TcpCore> core_;
  const Hello hello_;
  const std::vector<std::shared_ptr<TcpConnection>> connections_;
  boost::asio::steady_timer timer_;  ///< used at home only

  std::mutex mutex_;
  State state_ = State::kOpen;
  Status why_;
  Nanos expired_at_ = Nanos::min();  ///< operations due by then have ended the session
  std::deque<GetOperation> waiting_;
  uint32_t in_flight_ = 0;
  std::vector<uint64_t> outstanding_bytes_;
  std::multiset<Nanos> deadlines_;  ///< of all operations
  Nanos armed_ = Nanos::max();      ///< when the timer fires
  uint32_t notifies_queued_ = 0;
  size_t connections_open_;
};

}  // namespace weightwire::transport
