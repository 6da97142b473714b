#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "server/transfer/delta_base.h"

namespace weightwire::transfer {

/// Which slots of which streams a rank holds, verified: its target job says so, the job that passes
/// them on waits for it. Strand-only; shared by the two.
class SlotBitmap {
 public:
  /// `delta`: what it was made of, where it was made so; region null: it was read.
  void Add(uint32_t stream, uint32_t slot, SlotDelta delta = {}) {
    if (delta.region) deltas_[{stream, slot}] = std::move(delta);
    std::vector<bool>& slots = slots_[stream];
    if (slots.size() <= slot) slots.resize(slot + 1);
    slots[slot] = true;
    if (listener_) listener_(stream);
  }
  bool Has(uint32_t stream, uint32_t slot) const {
    const auto found = slots_.find(stream);
    return found != slots_.end() && slot < found->second.size() && found->second[slot];
  }
  /// Once.
  std::optional<SlotDelta> TakeDelta(uint32_t stream, uint32_t slot) {
    const auto found = deltas_.find({stream, slot});
    if (found == deltas_.end()) return std::nullopt;
    return std::move(deltas_.extract(found).mapped());
  }
  /// The target job has failed: nothing more will come.
  void Abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }
  /// Called with the stream after each Add.
  void Listen(std::function<void(uint32_t)> listener) { listener_ = std::move(listener); }

 private:
  std::map<uint32_t, std::vector<bool>> slots_;
  std::map<std::pair<uint32_t, uint32_t>, SlotDelta> deltas_;
  std::function<void(uint32_t)> listener_;
  bool abandoned_ = false;
};

}  // namespace weightwire::transfer
