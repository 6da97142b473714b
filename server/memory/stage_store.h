#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "server/base/ids.h"
#include "server/memory/gpu_memory_pool.h"
#include "server/memory/region.h"

namespace weightwire::memory {

/// Where each local tensor of a rank lies in one of its buffers: offsets aligned to 64 bytes, in
/// binding order. The same function on both sides of the fd, so only the total needs checking.
struct ArenaMap {
  std::vector<uint64_t> offsets;
  std::vector<uint64_t> sizes;
  uint64_t bytes_total = 0;  ///< ≥ 1
};
///   kInvalidArgument / kShapeOverflow  the sum does not fit
Result<ArenaMap> ArenaMapOf(const std::vector<uint64_t>& tensor_bytes);

/// A rank's buffers: one where there is no room for a second copy, two to change pointers, and one
/// for each further version that is to stay whole while the next one is moved.
constexpr uint32_t kBuffersMax = 8;
constexpr uint32_t kBuffersUsual = 2;

/// One rank's buffers: `live` holds what the engine serves, `next` is written by the epoch in
/// progress, the others hold what was served before, the newest versions. With one buffer `live`
/// and `next` are the same: what is served must be forgotten before the next epoch is written. Each
/// buffer is one memfd, or one GPU pool of a GPU, that the engine's process maps too.
///
/// Not thread-safe: belongs to the agent's strand. Budget: count × arena bytes, allocated at once.
class StageBuffers {
 public:
  /// `count`: 1 to kBuffersMax. `gpu_pools`: of the GPU where they are to lie; null: in host
  /// memory.
  static Result<std::unique_ptr<StageBuffers>> Make(
      const std::string& name, ArenaMap arena, uint32_t count,
      const std::shared_ptr<GpuMemoryPool>& gpu_pools = {});

  const ArenaMap& arena() const { return arena_; }
  const std::vector<std::shared_ptr<MemoryRegion>>& regions() const { return regions_; }
  /// Index into regions() of the buffer that holds the served epoch; −1 when the engine has none.
  int live() const { return live_; }
  /// The buffer that the next epoch writes: an empty one, else the one with the oldest content;
  /// what is served only where there is no other.
  int next() const;
  /// `next` is not what is served.
  bool has_room() const { return next() != live_; }
  /// What an epoch was committed with, whole in a buffer.
  struct Content {
    Epoch epoch{};  ///< 0: nothing of that kind
    Version version{};
    friend bool operator==(const Content&, const Content&) = default;
  };
  Content served() const { return live_ < 0 ? Content{} : contents_[Index(live_)]; }
  Epoch live_epoch() const { return served().epoch; }
  /// Whole beside what is served, newest first: what was served before.
  std::vector<Content> held() const { return HeldBut(live_); }
  /// `held` without what the next epoch overwrites.
  std::vector<Content> held_beyond() const { return HeldBut(next()); }
  /// The buffer that holds `epoch` and is not the live one; −1 when none does.
  int HolderOf(Epoch epoch) const;
  /// `buffer` is written from now on: what it held is lost.
  void Overwrite(int buffer) { contents_[Index(buffer)] = {}; }
  /// The engine swapped: `buffer` is `live` from now on, and holds `content`.
  void Flip(int buffer, Content content);
  /// Nothing is served from here any more.
  void Forget();

 private:
  StageBuffers() = default;
  static size_t Index(int buffer) { return static_cast<size_t>(buffer); }
  std::vector<Content> HeldBut(int without) const;
  ArenaMap arena_;
  std::vector<std::shared_ptr<MemoryRegion>> regions_;
  int live_ = -1;
  std::array<Content, kBuffersMax> contents_;
};

}  // namespace weightwire::memory
