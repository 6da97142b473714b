#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "server/device/bytes.h"
#include "server/plan/segments.h"
#include "server/transfer/segment_copy.h"
#include "server/transfer/transfer.h"

namespace weightwire::transfer {

/// The source's sums of a stream, for who copies its segments from mapped memory. Any thread; no
/// segment is asked for by two at a time. `segment` and `first` are indices in the schedule.
class SourceSums {
 public:
  virtual ~SourceSums() = default;
  /// Is the sum there without anything being read?
  virtual bool Has(uint32_t segment) const = 0;
  /// Of segments from `first` on, one for each of `into`.
  virtual Status Sum(uint32_t first, std::span<uint64_t> into) = 0;
  /// Where the source's sum is still to be made: makes it while the segment is copied from `source`
  /// to `target`, so that memory is read once (kernels::CopyAndSumBoth). nullopt: nothing was done,
  /// for the sum is there, or the source does not find the same bytes in the same order.
  virtual std::optional<kernels::BothSums> CopyAndSum(uint32_t segment, device::Bytes target,
                                                      device::ConstBytes source,
                                                      const SegmentCopy& copy) = 0;
};

/// Those of a slot, as they lie in `memory`, which must outlive the result.
std::unique_ptr<SourceSums> SumsIn(std::span<const std::byte> memory, const plan::SlotSpan& slot);

/// Those that a source makes of its own tensors, as its own slice has them, and keeps in `sums`,
/// which must not be resized while somebody asks. `known`: by segment, whether its sum is in `sums`
/// from the start; empty: none is. What is referred to must outlive it.
class OwnSums final : public SourceSums {
 public:
  OwnSums(const plan::Stream& stream, const plan::StreamSchedule& schedule, const Binding& binding,
          std::vector<uint64_t>& sums, const std::vector<bool>& known)
      : stream_(stream), schedule_(schedule), binding_(binding), sums_(sums), known_(known) {}
  bool Has(uint32_t segment) const override { return !known_.empty() && known_[segment]; }
  Status Sum(uint32_t first, std::span<uint64_t> into) override;
  std::optional<kernels::BothSums> CopyAndSum(uint32_t segment, device::Bytes target,
                                              device::ConstBytes source,
                                              const SegmentCopy& copy) override;

 private:
  const plan::Stream& stream_;
  const plan::StreamSchedule& schedule_;
  const Binding& binding_;
  std::vector<uint64_t>& sums_;
  const std::vector<bool>& known_;
};

}  // namespace weightwire::transfer
