#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/device/bytes.h"
#include "server/memory/region.h"
#include "server/transport/session.h"

/// Moves bytes between agents. Knows nothing of tensors, plans or epochs.
///
/// The contract that tests/conformance proves on every transport:
///  1. Every posted operation ends with exactly one completion; an expired deadline is one.
///  2. After the completion the transport never touches the operation's buffers again.
///  3. An operation with a stale incarnation or generation fails before any byte moves.
///  4. Completions and handler calls run on the transport's own threads and hold no lock.
///  5. Viable() says in words why a transport cannot run here.
///  6. Close(): no new chunk is started, what is in flight is bounded, then everything completes
///     with kCancelled. Buffers are free when their completions have run.
namespace weightwire::transport {

/// Names what a peer exported. `id` is unique in the exporting process and never reused;
/// `generation` rises when the same memory is exported anew, so that an old key cannot read it.
struct RegionKey {
  uint64_t id = 0;
  uint64_t generation = 0;
  friend constexpr auto operator<=>(const RegionKey&, const RegionKey&) = default;
};

/// An exported address space: the concatenation of pieces. Pieces keep their regions alive until
/// the export is revoked *and* the last operation on it has ended.
using GatherList = std::vector<memory::RegionSpan>;

/// Told of bytes [offset, offset + bytes) of an export, on the thread that is about to send them
/// and is held up meanwhile; on several at once where several read. What it writes there is sent.
using Leaving = std::function<void(uint64_t offset, uint64_t bytes)>;

/// Where a Get writes: host memory, or a range of a GPU's, which the host never touches: data()
/// aborts then. Whoever made it keeps the memory alive.
class MutableSpan {
 public:
  MutableSpan() = default;
  template <typename Range>
  requires std::convertible_to<Range&, std::span<std::byte>> MutableSpan(Range&& host)
      : MutableSpan(std::span<std::byte>(host).data(), std::span<std::byte>(host).size()) {}
  MutableSpan(std::byte* host, size_t bytes) : at_(host), bytes_(bytes) {}
  /// Of either kind.
  MutableSpan(const memory::MemoryRegion& region, uint64_t offset, size_t bytes)
      : at_(region.bytes().at + offset),
        bytes_(bytes),
        allocation_(region.on_device() ? &region.allocation() : nullptr) {}

  size_t size() const { return bytes_; }
  bool empty() const { return bytes_ == 0; }
  /// Of the host only.
  std::byte* data() const {
    WW_CHECK(!on_device());
    return at_;
  }
  bool on_device() const { return allocation_ != nullptr; }
  /// Of a GPU's memory: what it is a range of.
  const device::Allocation& allocation() const { return *allocation_; }
  /// For what can touch either.
  device::Bytes at() const { return {at_, on_device() ? &allocation_->device() : nullptr}; }

  MutableSpan subspan(size_t offset) const {
    MutableSpan rest = *this;
    rest.at_ += offset;
    rest.bytes_ -= offset;
    return rest;
  }
  /// `next` begins where this ends, in the same memory.
  bool MeetsWith(const MutableSpan& next) const {
    return next.allocation_ == allocation_ && next.at_ == at_ + bytes_;
  }
  void Extend(size_t bytes) { bytes_ += bytes; }

 private:
  std::byte* at_ = nullptr;
  size_t bytes_ = 0;
  const device::Allocation* allocation_ = nullptr;  ///< null: the host's
};

/// Bytes of a peer, of the host's memory or of a GPU's, as seen in this process.
struct MappedPiece {
  device::ConstBytes at;
  uint64_t bytes = 0;
};

/// A peer's export: its pieces, in order, for reading only. Unmapped when the last copy of `hold`
/// goes; until then a GPU's memory is lent to nobody else.
struct MappedList {
  std::vector<MappedPiece> pieces;
  std::shared_ptr<void> hold;
};

struct Capabilities {
  bool get = true;
  bool map = false;  ///< Map() works: same host, shareable memory
  /// Map() works for GPU memory too.
  bool maps_device_memory = false;
  /// Pieces of an export and spans of a Get may lie on a GPU. Without it neither may, but for what
  /// is only mapped: whatever runs into one aborts. What the peer does is its own matter.
  bool gets_device_memory = false;
  /// What a Get has written to a GPU is seen by work there only after Device::FlushWrites.
  bool flush_device_writes = false;
  bool gets_through = false;        ///< GetThrough() calls its `take`
  bool tells_leaving = false;       ///< ExportTold() works
  uint64_t chunk_bytes_max = 0;     ///< largest Get
  uint32_t gets_in_flight_max = 0;  ///< per endpoint; a further Get queues inside the transport
  bool checks_payload = false;      ///< payload is checksummed below us (none today)
};

inline constexpr size_t kNotifyBytesMax = 64;

/// One session with one peer. Thread-safe. Shared: a completion may outlive the caller.
class Endpoint {
 public:
  using GetDone = std::function<void(Status)>;
  using MapDone = std::function<void(Result<MappedList>)>;
  virtual ~Endpoint() = default;

  /// Unique in the process, whatever the transport.
  uint64_t id() const { return id_; }
  /// Of the caller, us or the peer, as it opened the session.
  virtual const Hello& hello() const = 0;
  /// "shm", "tcp", …; for metrics and status.
  virtual const std::string& transport_name() const = 0;

  /// Reads `offset …` of the peer's export into `into` (total bytes = Σ sizes, ≥ 1), in order.
  /// `into` must stay valid until `done` runs; `hold` is released right after. Its spans do not
  /// overlap: what has come may be read back there, to check it.
  ///   kNotFound / kStaleIncarnation  the key is unknown or revoked
  ///   kOutOfRange / kInvalidRequest  the range leaves the export
  ///   kDeadlineExceeded              not finished within `timeout`; the endpoint is then closed
  ///   kCancelled                     Close() was called
  ///   kUnavailable / kTransportFailed  the connection broke
  virtual void Get(RegionKey key, uint64_t offset, std::vector<MutableSpan> into, Nanos timeout,
                   std::shared_ptr<void> hold, GetDone done) = 0;

  /// Brings the next bytes of a Get to where they belong in its `into`.
  using Take = std::function<void(std::span<const std::byte> piece)>;
  /// Get, whose caller may bring the bytes to `into` itself, as they come: out of a buffer of the
  /// transport that is still in the cache of the thread that filled it. `take` runs on a thread of
  /// the transport, piece by piece, in order and never after `done`; it must be quick. Only when
  /// `done` hears OK were they what the peer sent. A transport that writes `into` without such a
  /// buffer never calls it: this one.
  virtual void GetThrough(RegionKey key, uint64_t offset, std::vector<MutableSpan> into,
                          Nanos timeout, std::shared_ptr<void> hold, Take, GetDone done) {
    Get(key, offset, std::move(into), timeout, std::move(hold), std::move(done));
  }

  /// Sends at most kNotifyBytesMax bytes; delivered at most once, in order, or the endpoint closes.
  ///   kUnavailable / kTransportFailed  closed; kResourceExhausted / kLimitExceeded  queue bound
  ///   met
  virtual Status Notify(std::span<const std::byte> message) = 0;

  /// Maps a peer's export; kUnimplemented where Capabilities::map is false. Errors as for Get, and
  ///   kFailedPrecondition / kTransportFailed, kUnavailable / kMemoryInvalid  a GPU's memory cannot
  ///     be mapped here; says which GPU and why. The session goes on.
  virtual void Map(RegionKey key, Nanos timeout, MapDone done) = 0;

  /// Idempotent. Handler::OnClosed runs once afterwards, after all completions.
  virtual void Close() = 0;

 private:
  static uint64_t NextId() {
    static std::atomic<uint64_t> next{1};
    return next.fetch_add(1, std::memory_order_relaxed);
  }

  const uint64_t id_ = NextId();
};

/// What a transport calls; implemented by transfer/. Calls for one endpoint come one after another.
class Handler {
 public:
  virtual ~Handler() = default;
  /// Decides on an inbound session before anything else may happen on it: the ticket that `said`
  /// names, which its caller must then prove to have (proof.h: NameIn). Must not block.
  ///   kUnauthenticated / kTicketRejected       no such ticket, or another caller's
  ///   kFailedPrecondition / kProtocolVersion   a ticket that is shown will not do
  virtual Result<Ticket> OnHello(const CallerHello& said) = 0;
  virtual void OnAccepted(std::shared_ptr<Endpoint> endpoint) = 0;
  /// `message` is valid during the call.
  virtual void OnNotify(const std::shared_ptr<Endpoint>& endpoint,
                        std::span<const std::byte> message) = 0;
  virtual void OnClosed(const std::shared_ptr<Endpoint>& endpoint, const Status& why) = 0;
};

/// One way of moving bytes. Thread-safe. Destroying it closes every endpoint and joins its threads;
/// it must not be destroyed on one of them.
class Transport {
 public:
  using ConnectDone = std::function<void(Result<std::shared_ptr<Endpoint>>)>;
  virtual ~Transport() = default;

  virtual const std::string& name() const = 0;
  virtual Capabilities capabilities() const = 0;
  /// OK, or why it cannot run on this host.
  virtual Status Viable() const = 0;
  /// What it chose to run on and why, for log and status page; empty: it had no choice.
  virtual std::string choices() const { return {}; }
  /// Starts to listen. Once, before anything else. `handler` must outlive the transport.
  virtual Status Start(Handler* handler, Incarnation self) = 0;
  /// Where peers connect to ("127.0.0.1:4711", "@abstract-name"); valid after Start.
  virtual std::string address() const = 0;
  /// OK, or why no session with the peer at `address` would be of use, as far as that is known
  /// without asking it.
  virtual Status Reaches(const std::string& /*address*/) const { return OkStatus(); }

  virtual RegionKey Export(GatherList pieces) = 0;
  /// Export, where what is read is shown to `leaving` first. It is destroyed, on any thread, before
  /// `done` of a later Revoke runs. Requires Capabilities::tells_leaving.
  virtual RegionKey ExportTold(GatherList /*pieces*/, Leaving) { WW_CHECK(false); }
  /// Later operations on `key` fail; those under way end first or fail. `done` runs when no
  /// operation of this transport touches the pieces any more. Memory that a peer has *mapped* is
  /// the caller's to drain (transfer/ waits for the reader's CLOSE or for the end of the session).
  virtual void Revoke(RegionKey key, std::function<void()> done) = 0;

  /// Opens a session. `hello.callee` must be the peer's incarnation. From kProtocolProof on both
  /// sides prove that they have `hello.ticket`, which is not sent.
  ///   kUnauthenticated / kTicketRejected, kFailedPrecondition / kStaleIncarnation |
  ///   kProtocolVersion        the peer's answer
  ///   kDeadlineExceeded, kUnavailable / kTransportFailed
  virtual void Connect(const std::string& address, const Hello& hello, Nanos timeout,
                       ConnectDone done) = 0;
};

}  // namespace weightwire::transport
