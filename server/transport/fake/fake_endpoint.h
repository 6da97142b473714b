#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/transport/fake/fake_world.h"

namespace weightwire::transport {

/// One end of a session; the other end is `peer_`. Messages are tasks posted after the latency.
class FakeEndpoint final : public Endpoint, public std::enable_shared_from_this<FakeEndpoint> {
 public:
  FakeEndpoint(std::shared_ptr<FakeNode> node, std::string peer_address, Hello hello);
  /// Makes the two ends know each other; both are open then.
  static void Join(const std::shared_ptr<FakeEndpoint>& a, const std::shared_ptr<FakeEndpoint>& b);

  const Hello& hello() const override { return hello_; }
  const std::string& transport_name() const override { return node_->options.name; }
  void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
           std::shared_ptr<void> hold, GetDone done) override;
  Status Notify(std::span<const std::byte> message) override;
  void Map(RegionKey key, Nanos timeout, MapDone done) override;
  void Close() override;

  bool open() const { return !closed_.has_value(); }
  const std::string& peer_address() const { return peer_address_; }
  /// Both ends fail as when a connection is reset.
  void Break();
  /// Runs at once what an ended session still owes: completions, then OnClosed.
  void Settle();
  /// The caller knows the endpoint from now on; before that its handler hears nothing of it.
  void Announce() { announced_ = true; }
  /// Notifies that are sent earlier arrive then.
  void DelayNotifiesUntil(Nanos due) { notify_due_ = due; }

 private:
  struct Operation {
    RegionKey key;
    uint64_t offset = 0;
    std::vector<MutableSpan> into;
    std::shared_ptr<void> hold;
    Executor::TimerId timer = 0;
    GetDone get_done;
    MapDone map_done;  ///< set for a Map
  };

  /// Runs `action(*this)` later, unless the endpoint is gone by then.
  template <typename Action>
  void After(Nanos delay, Action action);
  void Begin(Operation operation, Nanos timeout);
  void Advance();
  void Launch(uint64_t number);
  /// Runs on the side that holds the memory, for operation `number` of the peer.
  void Serve(uint64_t number);
  void ServeGet(uint64_t number, std::shared_ptr<const Exported> exported);
  void ServeMap(uint64_t number, std::shared_ptr<const Exported> exported);
  /// Run on the reader's side when the bytes arrive, and when its NIC has taken them.
  void Receive(uint64_t number, std::vector<PieceRange> ranges);
  void Deliver(uint64_t number, const std::vector<PieceRange>& ranges);
  Status Write(const MutableSpan& target, const PieceRange& source);
  Status MaybeCorrupt(const std::vector<MutableSpan>& into);
  void Finish(uint64_t number, Result<MappedList> result);
  void Expire(uint64_t number);
  /// Ends the session on this side; Settle is posted.
  void Shut(const Status& why);
  static void Complete(Operation& operation, Result<MappedList> result);

  const std::shared_ptr<FakeNode> node_;
  const std::string peer_address_;
  const Hello hello_;
  std::weak_ptr<FakeEndpoint> peer_;
  std::optional<Status> closed_;
  bool settled_ = false;
  bool announced_ = false;
  uint64_t next_operation_ = 1;
  std::map<uint64_t, Operation> operations_;  ///< posted and not completed
  std::deque<uint64_t> waiting_;              ///< of them, not sent yet
  uint32_t in_flight_ = 0;
  /// The peer's operations that we serve: held until they are delivered or the session ends.
  std::map<uint64_t, std::shared_ptr<const Exported>> serving_;
  uint32_t notifies_queued_ = 0;
  Nanos notify_due_{0};  ///< arrival of the last notify: none may overtake it
};

}  // namespace weightwire::transport
