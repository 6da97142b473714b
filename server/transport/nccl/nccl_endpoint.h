#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "server/transport/nccl/nccl_core.h"
#include "server/transport/nccl/nccl_lane.h"

namespace weightwire::transport {

/// One session: `inner`, one of tcp, and lanes: those that we read over, and those of the peer.
///
/// It ends when `inner` ends, or with FailSession, which ends `inner`: the lanes stop, complete
/// what they have, and the last one lets OnClosed be called. All that the user hears runs on the
/// transport's thread.
class NcclEndpoint final : public Endpoint, public std::enable_shared_from_this<NcclEndpoint> {
 public:
  NcclEndpoint(std::shared_ptr<NcclCore> core, std::shared_ptr<Endpoint> inner)
      : core_(std::move(core)), inner_(std::move(inner)) {}

  const Hello& hello() const override { return inner_->hello(); }
  const std::string& transport_name() const override { return core_->name; }
  void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
           std::shared_ptr<void> hold, GetDone done) override;
  Status Notify(std::span<const std::byte> message) override;
  void Map(RegionKey key, Nanos timeout, MapDone done) override;
  void Close() override { inner_->Close(); }

  /// Of who called: `done` hears of it once the first lane carries something.
  void Open(Transport::ConnectDone done);

  // On the threads of the inner transport.
  void OnMessage(std::span<const std::byte> bytes);
  void OnInnerClosed(const Status& why);

  // On those of the lanes.
  Status Tell(const std::vector<std::byte>& message) { return inner_->Notify(message); }
  void OnLaneFormed();
  void OnLaneEnded(std::shared_ptr<NcclLane> lane);
  /// Ends the session, whose Gets hear that NCCL failed, and why.
  void FailSession(Status why);
  /// Ends the session: an operation's deadline is over.
  void Expire();
  /// What an operation hears that the end of the session caught.
  Status EndOf(const GetOperation& operation);

  NcclCore& core() const { return *core_; }

 private:
  Status OnForm(const NcclForm& form);
  Status OnRequest(const NcclRequest& request);
  std::shared_ptr<NcclReceiveLane> ReceiveLane(uint32_t number);
  /// True: the session was open, and ends for `why`.
  bool End(Status why);
  void MaybeSettle();

  const std::shared_ptr<NcclCore> core_;
  const std::shared_ptr<Endpoint> inner_;

  std::mutex mutex_;
  bool told_ = false;                          ///< the user has the session, or will be given it
  Transport::ConnectDone opened_;              ///< of who waits for the first lane
  std::vector<std::vector<std::byte>> early_;  ///< notifies that came before
  std::map<uint32_t, std::shared_ptr<NcclReceiveLane>> receiving_;
  std::map<uint32_t, std::shared_ptr<NcclSendLane>> sending_;
  size_t lanes_ = 0;  ///< that have not been joined
  bool ended_ = false;
  bool inner_closed_ = false;
  bool settled_ = false;
  Status why_;
  Nanos expired_at_ = Nanos::min();
};

}  // namespace weightwire::transport
