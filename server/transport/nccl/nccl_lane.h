#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "server/transport/nccl/nccl_core.h"
#include "server/transport/operation.h"

namespace weightwire::transport {

/// A communicator between one GPU of ours and one of the peer, and the thread that drives it, which
/// alone blocks: on NCCL, on copies, on what the peer says.
///
/// A round: the callee gathers what was asked for into a buffer, announces which bytes of which
/// requests it holds (NcclRequest), and sends it; the caller receives as much and brings it to
/// where it belongs. So both sides enqueue the same rounds in the same order, whatever the pieces
/// of either.
class NcclLane : public std::enable_shared_from_this<NcclLane> {
 public:
  NcclLane(std::shared_ptr<NcclEndpoint> endpoint, NcclCore::Gpu& gpu, uint32_t number);
  virtual ~NcclLane() = default;

  void Start();
  /// On any thread: the lane ends; what it runs is aborted.
  void Stop();
  /// On the transport's thread, when the lane has said that it ended.
  void Join() { thread_.join(); }

 protected:
  /// On the lane's thread: forms the communicator and moves a pattern.
  virtual Status Form(NcclPair& pair) = 0;
  /// On the lane's thread: serves until stopping(), or until something fails.
  virtual Status Serve(NcclPair& pair) = 0;
  /// On the lane's thread, at the end.
  virtual void Drain() {}

  NcclCore& core() const;
  bool stopping() const { return stopping_; }

  const std::shared_ptr<NcclEndpoint> endpoint_;
  NcclCore::Gpu& gpu_;
  const uint32_t number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> stopping_{false};  ///< set under mutex_

 private:
  void Run();
  /// Until the lane has ended: what it is about to begin is no less to be aborted.
  void AbortOn();

  bool ended_ = false;              ///< under mutex_
  std::shared_ptr<NcclPair> pair_;  ///< under mutex_; null: none, or none any more
  std::thread thread_;
};

/// Of who reads.
class NcclReceiveLane final : public NcclLane {
 public:
  using NcclLane::NcclLane;
  /// On any thread.
  void Submit(GetOperation operation);
  /// A reply of the peer. kInvalidArgument: it breaks the rules.
  Status OnReply(const Frame& frame);

 private:
  struct Asked {
    GetOperation get;
    uint64_t announced = 0;  ///< bytes that rounds hold
    uint64_t arrived = 0;
  };
  struct Part {
    uint64_t request = 0;
    uint64_t bytes = 0;
  };
  using Round = std::vector<Part>;

  Status Form(NcclPair& pair) override;
  Status Serve(NcclPair& pair) override;
  void Drain() override;
  Status Receive(NcclPair& pair, const Round& round);
  void AdvanceLocked();
  void ArmLocked();
  void OnTimer();
  void Complete(GetOperation operation, Status status);

  // Under mutex_.
  bool announced_ = false;  ///< the peer knows of the lane
  bool drained_ = false;
  uint64_t next_request_ = 1;
  std::deque<GetOperation> waiting_;
  std::map<uint64_t, Asked> asked_;
  std::multiset<Nanos> deadlines_;  ///< of both
  Nanos armed_ = Nanos::max();      ///< when the timer fires
  Round announcing_;
  std::deque<Round> rounds_;
};

/// Of who is read from.
class NcclSendLane final : public NcclLane {
 public:
  NcclSendLane(std::shared_ptr<NcclEndpoint> endpoint, NcclCore::Gpu& gpu, const NcclForm& form)
      : NcclLane(std::move(endpoint), gpu, form.lane), form_(form) {}
  /// A request of the peer. kInvalidArgument: it breaks the rules.
  Status OnRequest(const Frame& frame);

 private:
  struct Wanted {
    Frame frame;
    std::shared_ptr<const Exported> exported;  ///< null: not looked at yet
    uint64_t sent = 0;
  };

  Status Form(NcclPair& pair) override;
  Status Serve(NcclPair& pair) override;
  void Drain() override { wanted_.clear(); }
  Status Send(NcclPair& pair);
  Status Reply(const Frame& frame);

  const NcclForm form_;
  std::deque<Frame> requests_;  ///< under mutex_
  std::deque<Wanted> wanted_;   ///< the lane's thread only
};

}  // namespace weightwire::transport
