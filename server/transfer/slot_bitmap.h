#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace weightwire::transfer {

/// Which slots of which streams a rank holds, verified: its target job says so, the job that passes
/// them on waits for it. Strand-only; shared by the two.
class SlotBitmap {
 public:
  void Add(uint32_t stream, uint32_t slot) {
    std::vector<bool>& slots = slots_[stream];
    if (slots.size() <= slot) slots.resize(slot + 1);
    slots[slot] = true;
    if (listener_) listener_(stream);
  }
  bool Has(uint32_t stream, uint32_t slot) const {
    const auto found = slots_.find(stream);
    return found != slots_.end() && slot < found->second.size() && found->second[slot];
  }
  /// The target job has failed: nothing more will come.
  void Abandon() { abandoned_ = true; }
  bool abandoned() const { return abandoned_; }
  /// Called with the stream after each Add.
  void Listen(std::function<void(uint32_t)> listener) { listener_ = std::move(listener); }

 private:
  std::map<uint32_t, std::vector<bool>> slots_;
  std::function<void(uint32_t)> listener_;
  bool abandoned_ = false;
};

}  // namespace weightwire::transfer
