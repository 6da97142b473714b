#pragma once

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "server/transport/frame.h"
#include "server/transport/operation.h"
#include "server/transport/ucx/ucx_core.h"
#include "server/transport/ucx/ucx_messages.h"
#include "server/transport/ucx/ucx_self_test.h"

namespace weightwire::transport {

/// One session over one connection of the plug-in. A Get asks the source for leave, which names the
/// memory and keeps it alive; then UCX reads, and the reader gives the leave back. Calls of other
/// threads are posted to the loop, where everything happens.
///
/// Begin: nobody has the session before it passed its self-test, and nobody hears of its end then.
/// End: a Close of ours lets reads under way end first, ours and those of the peer, for a while:
/// UCX is at its frailest when it drops traffic. Any other end comes at once. The connection is
/// closed; when UCX has let go of all memory, OnClosed completes every Get, frees what the peer had
/// leave for, and tells the handler.
class UcxEndpoint final : public Endpoint,
                          public UcxConnection,
                          public std::enable_shared_from_this<UcxEndpoint> {
 public:
  /// `peer` and `peer_name`: of the other side, whoever called.
  UcxEndpoint(std::shared_ptr<UcxCore> core, const Hello& hello, uint64_t connection,
              Incarnation peer, std::string peer_name);
  /// On the loop. `proved` gets the session once it passed its self-test, or why there is none:
  ///   kUnavailable / kTransportFailed  it failed; names the peer, what UCX chose, and a remedy
  ///   kDeadlineExceeded                the same, in time
  ///   kCancelled                       the transport ended
  void Start(Nanos deadline, Transport::ConnectDone proved);

  const Hello& hello() const override { return hello_; }
  const std::string& transport_name() const override { return core_->name; }
  void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
           std::shared_ptr<void> hold, GetDone done) override;
  Status Notify(std::span<const std::byte> message) override;
  void Map(RegionKey key, Nanos timeout, MapDone done) override;
  void Close() override;

  void OnMessage(std::span<const std::byte> message) override;
  void OnSent() override;
  void OnRead(uint64_t request, const std::string& failure) override;
  void OnBroken(const std::string& why) override;
  void OnClosed() override;
  void OnRegionGone(uint64_t region) override;
  void Shut() override { Drain(); }

 private:
  enum class State { kOpen, kDraining, kClosing, kSettled };
  /// A Get whose request was sent.
  struct Active {
    GetOperation operation;
    bool reading = false;
    size_t reads = 0;  ///< under way
  };

  void OnSelfTest(const Frame& frame);
  void OnSelfTestEnd(bool passed);
  Status SelfTestFailure() const;
  void Begin(GetOperation operation);
  void Advance();
  void Send(Frame frame, std::span<const std::byte> payload = {}, bool report = false);
  void OnGet(const Frame& frame);
  Result<std::vector<std::byte>> Grant(const Frame& frame);
  Result<uint64_t> ShowKey(const std::shared_ptr<memory::MemoryRegion>& region);
  void OnGetReply(const UcxMessage& message);
  Status RegisterTargets(const GetOperation& operation);
  void Read(uint64_t request, const std::vector<UcxRange>& ranges);
  void OnRegion(const UcxMessage& message);
  void OnNotify(const UcxMessage& message);
  void Forget(uint64_t region);
  void Finish(uint64_t request, Status status);
  void ArmTimer();
  void OnTimer();
  void Drain();
  void CloseWhenDrained();
  void FailSession(Status why, const char* cause);
  void CloseNow();
  void Settle();
  void Garbage(const std::string& what);
  Status EndOf(const GetOperation& operation) const;

  const std::shared_ptr<UcxCore> core_;
  const Hello hello_;
  const uint64_t connection_;
  const std::string peer_name_;
  std::atomic<bool> open_{true};  ///< false once anything ended the session, or Close was called
  std::atomic<uint32_t> notifies_queued_{0};

  // On the loop.
  State state_ = State::kOpen;
  UcxSelfTest self_test_;
  Transport::ConnectDone proved_;  ///< null once it was called
  Nanos proof_deadline_{0};
  std::vector<std::string> lanes_;  ///< what UCX chose
  Status why_;
  Nanos expired_at_ = Nanos::min();  ///< operations due by then have ended the session
  std::deque<GetOperation> waiting_;
  std::map<uint64_t, Active> active_;
  uint64_t next_request_ = 1;
  std::multiset<Nanos> deadlines_;  ///< of all operations
  Nanos armed_ = Nanos::max();      ///< when the timer fires
  boost::asio::steady_timer timer_;
  std::map<uint64_t, std::shared_ptr<const Exported>> grants_;  ///< to the peer, by its request
  std::set<uint64_t> shown_;        ///< of UcxRegistered::id, those whose key the peer has
  std::map<uint64_t, void*> keys_;  ///< of the peer's memory, by its UcxRegistered::id
  uint64_t notifies_sent_ = 0;
  uint64_t notifies_received_ = 0;
};

}  // namespace weightwire::transport
