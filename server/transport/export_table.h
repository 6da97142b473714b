#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "server/base/executor.h"
#include "server/transport/spans.h"
#include "server/transport/transport.h"

namespace weightwire::transport {

/// A range of one exported piece. Valid while the Exported it came from is held.
struct PieceRange {
  const std::shared_ptr<memory::MemoryRegion>* region = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  /// Of the host only; aborts for a GPU's.
  ConstSpan span() const { return {(*region)->data() + offset, bytes}; }
  device::Bytes at() const { return (*region)->bytes() + offset; }
};

/// One export. Whoever holds it is an operation under way: the pieces stay alive, and callbacks of
/// Revoke wait. Immutable but for those callbacks.
class Exported {
 public:
  using Post = std::function<void(Task)>;
  Exported(GatherList pieces, Leaving leaving, std::shared_ptr<const Post> post);
  ~Exported();
  Exported(const Exported&) = delete;
  Exported& operator=(const Exported&) = delete;

  uint64_t bytes() const { return starts_.back(); }
  /// The non-empty ranges that make up [offset, offset + bytes), in order.
  ///   kOutOfRange / kInvalidRequest  the range is empty or leaves the export
  Result<std::vector<PieceRange>> Slice(uint64_t offset, uint64_t bytes) const;
  /// Every piece, empty ones too.
  std::vector<PieceRange> All() const;
  /// Before bytes of a Slice are read.
  void Tell(uint64_t offset, uint64_t bytes) const {
    if (leaving_) leaving_(offset, bytes);
  }

 private:
  friend class ExportTable;
  GatherList pieces_;
  std::vector<uint64_t> starts_;  ///< of each piece, and the total
  Leaving leaving_;               ///< null: nobody wants to know
  std::shared_ptr<const Post> post_;
  std::vector<Task> when_unused_;  ///< guarded by the table's mutex while a table knows us
};

/// What this process exports over one transport. Thread-safe.
class ExportTable {
 public:
  /// `post` runs a task on a thread of the transport; callbacks of Revoke go through it.
  explicit ExportTable(Exported::Post post);

  /// Ids are unique in the process, over all tables.
  RegionKey Export(GatherList pieces, Leaving leaving = nullptr);
  /// kNotFound / kStaleIncarnation: unknown, revoked, or another generation.
  Result<std::shared_ptr<const Exported>> Use(RegionKey key) const;
  /// See Transport::Revoke. An unknown key counts as unused.
  void Revoke(RegionKey key, Task done);

 private:
  const std::shared_ptr<const Exported::Post> post_;
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, std::pair<uint64_t, std::shared_ptr<Exported>>> live_;
  /// Revoked, with operations under way, so that a second Revoke waits for them too.
  std::unordered_map<uint64_t, std::weak_ptr<Exported>> draining_;
};

}  // namespace weightwire::transport
