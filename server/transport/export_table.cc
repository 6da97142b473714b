#include "server/transport/export_table.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "server/base/checked.h"

namespace weightwire::transport {
namespace {

/// One counter for ids and generations: each export gets a generation above all earlier ones, which
/// is more than the same memory needs.
uint64_t NextNumber() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Exported::Exported(GatherList pieces, Leaving leaving, std::shared_ptr<const Post> post)
    : pieces_(std::move(pieces)), leaving_(std::move(leaving)), post_(std::move(post)) {
  uint64_t total = 0;
  for (const memory::RegionSpan& piece : pieces_) {
    starts_.push_back(total);
    auto next = CheckedAdd(total, piece.bytes);
    WW_CHECK(next.has_value());
    total = *next;
  }
  starts_.push_back(total);
}

Exported::~Exported() {
  leaving_ = nullptr;
  for (Task& task : when_unused_) (*post_)(std::move(task));
}

Result<std::vector<PieceRange>> Exported::Slice(uint64_t offset, uint64_t bytes) const {
  auto end = CheckedAdd(offset, bytes);
  if (bytes == 0 || !end.has_value() || *end > this->bytes()) {
    return Fail(Code::kOutOfRange, Reason::kInvalidRequest,
                "range " + std::to_string(offset) + " + " + std::to_string(bytes) +
                    " leaves the export of " + std::to_string(this->bytes()) + " bytes");
  }
  std::vector<PieceRange> ranges;
  auto next = std::upper_bound(starts_.begin(), starts_.end(), offset);
  for (size_t i = static_cast<size_t>(next - starts_.begin()) - 1; offset < *end; ++i) {
    const uint64_t range = std::min(*end, starts_[i + 1]) - offset;
    if (range == 0) continue;
    ranges.push_back({&pieces_[i].region, pieces_[i].offset + (offset - starts_[i]), range});
    offset += range;
  }
  return ranges;
}

std::vector<PieceRange> Exported::All() const {
  std::vector<PieceRange> ranges;
  for (const memory::RegionSpan& piece : pieces_) {
    ranges.push_back({&piece.region, piece.offset, piece.bytes});
  }
  return ranges;
}

ExportTable::ExportTable(Exported::Post post)
    : post_(std::make_shared<const Exported::Post>(std::move(post))) {}

RegionKey ExportTable::Export(GatherList pieces, Leaving leaving) {
  auto exported = std::make_shared<Exported>(std::move(pieces), std::move(leaving), post_);
  const RegionKey key{NextNumber(), NextNumber()};
  std::lock_guard lock(mutex_);
  live_.emplace(key.id, std::pair(key.generation, std::move(exported)));
  return key;
}

Result<std::shared_ptr<const Exported>> ExportTable::Use(RegionKey key) const {
  std::lock_guard lock(mutex_);
  auto entry = live_.find(key.id);
  if (entry == live_.end() || entry->second.first != key.generation) {
    return Fail(Code::kNotFound, Reason::kStaleIncarnation,
                "export " + std::to_string(key.id) + " of generation " +
                    std::to_string(key.generation) + " is unknown or revoked");
  }
  return entry->second.second;
}

void ExportTable::Revoke(RegionKey key, Task done) {
  std::shared_ptr<Exported> exported;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(draining_, [](const auto& entry) { return entry.second.expired(); });
    auto entry = live_.find(key.id);
    if (entry != live_.end() && entry->second.first == key.generation) {
      exported = std::move(entry->second.second);
      live_.erase(entry);
      draining_.emplace(key.id, exported);
    } else if (auto drains = draining_.find(key.id); drains != draining_.end()) {
      exported = drains->second.lock();
    }
    if (exported != nullptr) exported->when_unused_.push_back(std::move(done));
  }
  // Outside the lock: what follows may run `done`, here or when `exported` was the last use.
  if (exported == nullptr) (*post_)(std::move(done));
}

}  // namespace weightwire::transport
