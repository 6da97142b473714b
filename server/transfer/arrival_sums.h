#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "server/plan/segments.h"
#include "server/transfer/fetch.h"
#include "server/transport/spans.h"

namespace weightwire::transfer {

/// Brings the bytes of one Get to where its scatter has them as they arrive, and sums the segments
/// that go straight to the destination: what is summed is what is written there, while it is in the
/// cache. Segments that go to scratch are left for UnpackAndSum. Used by one thread at a time.
class ArrivalSums {
 public:
  /// `scatter` is the chunk's, and stays where it is.
  ArrivalSums(const plan::StreamSchedule& schedule, const Chunk& chunk, const Scatter& scatter);
  /// The next bytes of the Get.
  void Take(std::span<const std::byte> piece);
  /// Of each segment, nullopt where it is not known, or never will be.
  std::span<const std::optional<uint64_t>> so_far() const { return sums_; }
  /// Every segment's sum is made.
  bool complete() const { return next_ == sums_.size(); }
  /// Requires complete().
  std::vector<uint64_t> TakeAll() const;

 private:
  struct SegmentRange {
    uint64_t begin = 0, end = 0;  ///< in the bytes of the Get
    uint32_t segment = 0;         ///< in the chunk
  };
  void Put(std::byte* to, std::span<const std::byte> some);

  std::vector<SegmentRange> ranges_;  ///< of the segments that are summed here, in order
  transport::SpanWriter place_;
  uint64_t position_ = 0;  ///< of the next byte of the Get
  size_t next_ = 0;        ///< in ranges_; so many sums are made
  kernels::RunningSum sum_;
  std::vector<std::optional<uint64_t>> sums_;
};

}  // namespace weightwire::transfer
