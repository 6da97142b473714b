#pragma once

#include <atomic>
#include <boost/asio/steady_timer.hpp>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/transport/frame.h"
#include "server/transport/local_core.h"
#include "server/transport/local_stream.h"
#include "server/transport/operation.h"
#include "server/transport/spans.h"

namespace weightwire::transport {

/// One session. What is public may be called on any thread and posts; the rest runs on the loop.
///
/// A Get: kGet → (kRegion …) kGetReply with the ranges to copy → copied by a copier → kGetEnd.
/// The exporter holds the export from kGet to kGetEnd, or to the end of the session, which the
/// reader sees at the socket before it trusts what it copied.
class LocalEndpoint final : public Endpoint, public std::enable_shared_from_this<LocalEndpoint> {
 public:
  LocalEndpoint(std::shared_ptr<LocalCore> core, const Hello& hello, Incarnation peer,
                std::shared_ptr<LocalStream> stream);

  const Hello& hello() const override { return hello_; }
  const std::string& transport_name() const override { return core_->name; }
  void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
           std::shared_ptr<void> hold, GetDone done) override;
  Status Notify(std::span<const std::byte> message) override;
  void Map(RegionKey key, Nanos timeout, MapDone done) override;
  void Close() override;

  Incarnation peer() const { return peer_; }
  /// On the loop: joins the core, runs `announce`, then reads.
  void Start(const Task& announce);
  /// On the loop.
  void ForgetDeadRegions();

 private:
  /// A Get or, with `map_done`, a Map.
  struct Operation {
    GetOperation get;
    MapDone map_done;
  };
  /// A Get that a copier works on.
  struct Copy {
    GetOperation get;
    std::vector<ConstSpan> from;
    std::vector<std::shared_ptr<memory::MemoryRegion>> regions;  ///< of `from`
    std::atomic<bool> stop{false};
    bool whole = false;
  };
  /// Mapped here, or why not. Null: the peer is this very process, and its region is ours; not
  /// held, so that it goes when nobody else needs it. Its bytes have one address then: a core finds
  /// what one reader has brought into its first cache for the next only under the same one.
  using PeerRegion = Result<std::shared_ptr<memory::MemoryRegion>>;
  /// What a reply names, mapped here.
  struct Mapped {
    std::vector<MappedPiece> pieces;
    std::vector<std::shared_ptr<memory::MemoryRegion>> regions;
    uint64_t bytes = 0;
    Status status;  ///< not OK: the first region that is not
  };

  void Begin(Operation operation);
  void Advance();
  void Arm();
  void OnTimer();
  static void End(Operation& operation, const Status& status);
  Status EndOf(const GetOperation& operation) const;

  Result<size_t> Consume(std::span<const std::byte> unread);
  Status OnFrame(const Frame& frame, std::span<const std::byte> payload);
  Status Serve(const Frame& frame);
  Status OnRegion(const Frame& frame, std::span<const std::byte> payload);
  Status OnReply(const Frame& frame, std::span<const std::byte> payload);
  Result<Mapped> Resolve(std::span<const std::byte> payload) const;
  void StartCopy(uint64_t request, GetOperation get, Mapped mapped);
  void OnCopied(uint64_t request);
  void SendFrame(const Frame& frame, std::span<const std::byte> payload = {},
                 std::shared_ptr<memory::MemoryRegion> region = nullptr);
  std::vector<std::byte> Describe(const std::vector<PieceRange>& ranges);
  void SendRegion(const std::shared_ptr<memory::MemoryRegion>& region);

  void FailSession(const Status& why, const char* cause);
  void Settle();

  const std::shared_ptr<LocalCore> core_;
  const Hello hello_;
  const Incarnation peer_;
  const std::shared_ptr<LocalStream> stream_;
  boost::asio::steady_timer timer_;

  std::atomic<bool> open_{true};  ///< for Notify; decided on the loop
  std::atomic<uint32_t> notifies_queued_{0};

  std::optional<Status> why_;  ///< why the session ended
  bool settled_ = false;
  Nanos expired_at_ = Nanos::min();
  std::multiset<Nanos> deadlines_;
  Nanos armed_ = Nanos::max();
  std::deque<Operation> waiting_;
  uint64_t next_request_ = 1;
  std::map<uint64_t, Operation> asked_;  ///< sent, not answered
  std::map<uint64_t, std::shared_ptr<Copy>> copying_;
  /// The peer's regions, by its ids.
  std::map<uint64_t, PeerRegion> regions_;

  /// The peer's Gets: from kGet to kGetEnd.
  std::map<uint64_t, std::shared_ptr<const Exported>> serving_;
  /// Our regions that the peer has.
  std::map<uint64_t, std::weak_ptr<memory::MemoryRegion>> sent_;
};

}  // namespace weightwire::transport
