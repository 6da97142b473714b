#include "server/transfer/delta_base.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "kernels/kernels.h"
#include "server/base/checked.h"

namespace weightwire::transfer {
namespace {

constexpr uint64_t kAlignment = 64;
/// A code that is not this much shorter than the segment is not worth making it of.
constexpr size_t kWorthwhile = 8;
constexpr uint8_t kRestMax = 16;
/// Regions between these sizes are used again.
constexpr uint64_t kRegionBytesMin = 64 << 10;
constexpr uint64_t kRegionBytesMax = 4 << 20;
constexpr uint64_t kIdleRegionBytesMax = 32 << 20;

uint64_t SumOf(std::span<const std::byte> bytes) {
  return kernels::SumContiguous(bytes.data(), bytes.size());
}

Status NoRoom(uint64_t bytes, const std::string& where, int error) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                "no room for " + std::to_string(bytes) + " bytes of a delta base in " + where +
                    ": " + std::strerror(error))
      .Remedy("set delta_folder to another folder, or delta: off");
}

// Its blocks are there before it is mapped: a full disk is an error here, not a SIGBUS later.
Result<memory::UniqueFd> FileIn(const std::string& folder, uint64_t bytes) {
  memory::UniqueFd fd(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd.get() < 0) return Fail(NoRoom(bytes, folder, errno));
  const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) return Fail(NoRoom(bytes, folder, error));
  return fd;
}

Result<std::byte*> MapFor(uint64_t bytes, const std::string& folder) {
  memory::UniqueFd fd;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  if (!folder.empty()) {
    WW_ASSIGN(fd, FileIn(folder, bytes));
    flags = MAP_SHARED;
  }
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd.get(), 0);
  if (at == MAP_FAILED) {
    return Fail(NoRoom(bytes, folder.empty() ? std::string("memory") : folder, errno));
  }
  if (folder.empty()) ::madvise(at, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(at);
}

}  // namespace

// ---- one stream --------------------------------------------------------------------------------

uint64_t StreamBase::BytesFor(const plan::StreamSchedule& schedule) {
  uint64_t bytes = 0;
  for (const plan::Segment& segment : schedule.segments) {
    bytes += RoundUp(static_cast<uint64_t>(segment.bytes), kAlignment);
  }
  return std::max<uint64_t>(bytes, 1);
}

Result<std::shared_ptr<StreamBase>> StreamBase::Make(const plan::StreamSchedule& schedule,
                                                     const DeltaPolicy& policy) {
  const uint64_t bytes = BytesFor(schedule);
  WW_ASSIGN(std::byte* const memory, MapFor(bytes, policy.folder));
  std::shared_ptr<StreamBase> base(new StreamBase(memory, bytes, policy.chain_max));
  uint64_t offset = 0;
  for (const plan::Segment& segment : schedule.segments) {
    base->segments_.emplace_back().offset = offset;
    offset += RoundUp(static_cast<uint64_t>(segment.bytes), kAlignment);
  }
  return base;
}

StreamBase::~StreamBase() { ::munmap(memory_, bytes_); }

// The sum is made in the pass that finds the changes, but of a segment that did not change the last
// time: that one's base need not be read where its sum is the same again.
uint64_t StreamBase::Update(uint32_t index, kernels::DeltaOrder order,
                            std::span<const std::byte> now, std::optional<uint64_t> sum,
                            delta::Coder& coder) {
  Segment& segment = segments_[index];
  const std::span<std::byte> base(memory_ + segment.offset, now.size());
  if (adaptive_ && segment.rest > 0) {
    --segment.rest;
    segment.filled = false;
    segment.DropLinks();
    return sum ? *sum : SumOf(now);
  }
  if (!sum && (!segment.filled || segment.steady)) sum = SumOf(now);
  if (!segment.filled) {
    std::memcpy(base.data(), now.data(), now.size());
    segment.filled = true;
    segment.sum = *sum;
    return segment.sum;
  }
  segment.steady = sum && segment.sum == *sum;
  if (segment.steady) return segment.sum;
  const size_t most = now.size() - now.size() / kWorthwhile;
  uint64_t made = 0;
  const auto code = coder.EncodeAndCopy(order, base, now, most, sum ? nullptr : &made).bytes;
  const uint64_t from = std::exchange(segment.sum, sum.value_or(made));
  segment.steady = from == segment.sum;
  if (segment.steady) return from;
  if (code.empty() || 2 * code.size() > now.size()) {
    segment.rest = segment.next_rest;
    segment.next_rest = std::min<uint8_t>(2 * segment.next_rest, kRestMax);
  } else {
    segment.next_rest = 1;
  }
  if (code.empty()) {  // no way leads on from what there was
    segment.DropLinks();
    return segment.sum;
  }
  segment.links.push_front(
      {from, std::make_shared<const std::vector<std::byte>>(code.begin(), code.end())});
  segment.link_bytes += code.size();
  while (segment.links.size() > chain_max_ ||
         (segment.links.size() > 1 && segment.link_bytes > most)) {
    segment.link_bytes -= segment.links.back().code->size();
    segment.links.pop_back();
  }
  return segment.sum;
}

bool StreamBase::Begin(bool adaptive) {
  adaptive_ = adaptive;
  return !std::exchange(in_use_, true);
}

// ---- a rank's ----------------------------------------------------------------------------------

std::shared_ptr<StreamBase> DeltaBases::Of(const PlanId& plan, uint32_t stream,
                                           const plan::StreamSchedule& schedule) {
  auto& streams = plans_[plan];
  if (const auto found = streams.find(stream); found != streams.end()) return found->second.base;
  Entry& entry = streams[stream];
  entry.bytes = StreamBase::BytesFor(schedule);
  const auto made = [&]() -> Status {
    WW_ASSIGN_OR_STATUS(entry.share, admit_(entry.bytes));
    WW_ASSIGN_OR_STATUS(entry.base, StreamBase::Make(schedule, policy_));
    return OkStatus();
  }();
  if (!made.ok()) {
    entry = {};
    if (why_not_.ok()) why_not_ = made;
  }
  return entry.base;
}

void DeltaBases::Follow(const std::function<bool(const PlanId&)>& is_served) {
  if (std::erase_if(plans_, [&](const auto& entry) { return !is_served(entry.first); }) == 0) {
    return;
  }
  // What found no memory may find some now.
  why_not_ = OkStatus();
  for (auto& [plan, streams] : plans_) {
    std::erase_if(streams, [](const auto& entry) { return entry.second.base == nullptr; });
  }
}

void DeltaBases::GiveUp() {
  for (auto& [plan, streams] : plans_) {
    for (auto& [stream, entry] : streams) {
      if (entry.base == nullptr || entry.base->in_use()) continue;
      entry = {};
      why_not_ = Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                        "a delta base gave way to a stage or a snapshot")
                     .Remedy("raise the agent's stage budget, or set delta_folder");
    }
  }
}

uint64_t DeltaBases::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [plan, streams] : plans_) {
    for (const auto& [stream, entry] : streams) bytes += entry.bytes;
  }
  return bytes;
}

DeltaCoders::Lease DeltaCoders::Take() {
  std::unique_ptr<delta::Coder> coder;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      coder = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (!coder) coder = std::make_unique<delta::Coder>(segment_bytes_max_);
  return Lease(*this, std::move(coder));
}

void DeltaCoders::Return(std::unique_ptr<delta::Coder> coder) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(coder));
}

std::shared_ptr<memory::MemoryRegion> DeltaCoders::Region(uint64_t bytes) {
  const uint64_t size = std::max(kRegionBytesMin, std::bit_ceil(bytes));
  const bool returns = size <= kRegionBytesMax;
  std::shared_ptr<memory::MemoryRegion> region;
  if (returns) {
    const std::lock_guard lock(idle_->mutex);
    if (auto found = idle_->regions.find(size); found != idle_->regions.end()) {
      region = std::move(found->second);
      idle_->regions.erase(found);
      idle_->bytes -= size;
    }
  }
  if (!region) {
    auto made = memory::MemoryRegion::Allocate("delta", returns ? size : bytes);
    if (!made) return nullptr;
    region = std::move(*made);
  }
  if (!returns) return region;
  memory::MemoryRegion* const at = region.get();
  return {at, [idle = idle_, region = std::move(region), size](memory::MemoryRegion*) mutable {
            const std::lock_guard lock(idle->mutex);
            if (idle->bytes + size > kIdleRegionBytesMax) return;
            idle->bytes += size;
            idle->regions.emplace(size, std::move(region));
          }};
}

}  // namespace weightwire::transfer
