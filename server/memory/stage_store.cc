#include "server/memory/stage_store.h"

#include <algorithm>
#include <utility>

#include "server/base/checked.h"

namespace weightwire::memory {
namespace {

constexpr uint64_t kTensorAlignment = 64;

}  // namespace

Result<ArenaMap> ArenaMapOf(const std::vector<uint64_t>& tensor_bytes) {
  ArenaMap arena;
  uint64_t end = 0;
  for (size_t i = 0; i < tensor_bytes.size(); ++i) {
    auto padded = CheckedAdd(end, kTensorAlignment - 1);
    auto offset = padded ? std::optional(*padded / kTensorAlignment * kTensorAlignment) : padded;
    auto next = offset ? CheckedAdd(*offset, tensor_bytes[i]) : offset;
    if (!next.has_value()) {
      return Fail(Code::kInvalidArgument, Reason::kShapeOverflow,
                  "the arena's bytes do not fit at tensor " + std::to_string(i));
    }
    arena.offsets.push_back(*offset);
    arena.sizes.push_back(tensor_bytes[i]);
    end = *next;
  }
  arena.bytes_total = std::max<uint64_t>(end, 1);
  return arena;
}

Result<std::unique_ptr<StageBuffers>> StageBuffers::Make(
    const std::string& name, ArenaMap arena, uint32_t count,
    const std::shared_ptr<GpuMemoryPool>& gpu_pools) {
  WW_CHECK(count >= 1 && count <= kBuffersMax);
  std::unique_ptr<StageBuffers> stage(new StageBuffers());
  for (uint32_t buffer = 0; buffer < count; ++buffer) {
    const std::string what = name + "/" + std::to_string(buffer);
    WW_ASSIGN(std::shared_ptr<MemoryRegion> region,
              gpu_pools ? gpu_pools->Allocate(what, arena.bytes_total)
                        : MemoryRegion::Allocate(what, arena.bytes_total));
    stage->regions_.push_back(std::move(region));
  }
  stage->arena_ = std::move(arena);
  return stage;
}

int StageBuffers::next() const {
  int oldest = live_;
  for (int buffer = 0; buffer < static_cast<int>(regions_.size()); ++buffer) {
    if (buffer == live_) continue;
    if (oldest == live_ || contents_[Index(buffer)].epoch < contents_[Index(oldest)].epoch) {
      oldest = buffer;
    }
  }
  return std::max(oldest, 0);
}

int StageBuffers::HolderOf(Epoch epoch) const {
  for (int buffer = 0; buffer < static_cast<int>(regions_.size()); ++buffer) {
    if (buffer != live_ && epoch.value != 0 && contents_[Index(buffer)].epoch == epoch) {
      return buffer;
    }
  }
  return -1;
}

std::vector<StageBuffers::Content> StageBuffers::HeldBut(int without) const {
  std::vector<Content> held;
  for (int buffer = 0; buffer < static_cast<int>(regions_.size()); ++buffer) {
    const Content& content = contents_[Index(buffer)];
    if (buffer != live_ && buffer != without && content.epoch.value != 0) held.push_back(content);
  }
  std::sort(held.begin(), held.end(),
            [](const Content& a, const Content& b) { return b.epoch < a.epoch; });
  return held;
}

void StageBuffers::Flip(int buffer, Content content) {
  live_ = buffer;
  contents_[Index(live_)] = content;
}

void StageBuffers::Forget() {
  live_ = -1;
  contents_ = {};
}

}  // namespace weightwire::memory
