#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "server/base/ids.h"

namespace weightwire::transfer {

/// What one buffer's bytes summed to when they were written, by stream and segment. Bytes whose sum
/// is the one that a source announces need not be read again: those of an attempt that was cut
/// short, and those that a new version did not change. Only hints: who follows one sums the bytes
/// anew, so that a stale one costs time and nothing else. Strand-only.
class Kept {
 public:
  /// Sums of another plan are forgotten.
  void Follow(const PlanId& plan) {
    if (plan == plan_) return;
    plan_ = plan;
    sums_.clear();
  }
  void Note(uint32_t stream, uint32_t segment, uint64_t sum) {
    std::vector<uint64_t>& sums = sums_[stream];
    if (sums.size() <= segment) sums.resize(segment + 1);
    sums[segment] = sum;
  }
  /// The version that lies in the buffer is served now: what is written next is another one.
  void Settle() { settled_ = true; }
  /// Before something is written. False: of what is known something may be of the very version that
  /// is written now, by an attempt that came to nothing.
  bool Unsettle() { return std::exchange(settled_, false); }
  /// Of segments [first, first + count) of a stream of `plan`; kUnknown where nothing is known,
  /// empty where that is so for all of them.
  static constexpr uint64_t kUnknown = 0;
  std::vector<uint64_t> Of(const PlanId& plan, uint32_t stream, uint32_t first,
                           uint32_t count) const {
    const auto found = sums_.find(stream);
    if (plan != plan_ || found == sums_.end() || found->second.size() <= first) return {};
    std::vector<uint64_t> sums(count, kUnknown);
    const std::span known = std::span(found->second).subspan(first);
    std::copy_n(known.begin(), std::min<size_t>(count, known.size()), sums.begin());
    return sums;
  }

 private:
  PlanId plan_;
  bool settled_ = false;
  std::map<uint32_t, std::vector<uint64_t>> sums_;
};

/// The sums that a source has served, by stream and segment of one plan. A sum counts as long as
/// its tensor has the generation that it had then (SourceJob::generations). Strand-only.
class ServedSums {
 public:
  void Note(uint32_t stream, uint32_t segment, uint64_t generation, uint64_t sum) {
    std::vector<Served>& sums = sums_[stream];
    if (sums.size() <= segment) sums.resize(segment + 1);
    sums[segment] = {generation, sum};
  }
  std::optional<uint64_t> Of(uint32_t stream, uint32_t segment, uint64_t generation) const {
    const auto found = sums_.find(stream);
    if (found == sums_.end() || found->second.size() <= segment) return std::nullopt;
    const Served& served = found->second[segment];
    if (served.generation == 0 || served.generation != generation) return std::nullopt;
    return served.sum;
  }

 private:
  struct Served {
    uint64_t generation = 0;  ///< 0: nothing was served
    uint64_t sum = 0;
  };
  std::map<uint32_t, std::vector<Served>> sums_;
};

}  // namespace weightwire::transfer
