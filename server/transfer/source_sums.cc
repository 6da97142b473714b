#include "server/transfer/source_sums.h"

#include <algorithm>
#include <cstring>

#include "server/transfer/pack.h"

namespace weightwire::transfer {
namespace {

class MadeSums final : public SourceSums {
 public:
  MadeSums(std::span<const std::byte> memory, uint32_t first_segment)
      : memory_(memory), first_segment_(first_segment) {}
  bool Has(uint32_t) const override { return true; }
  Status Sum(uint32_t first, std::span<uint64_t> into) override {
    std::memcpy(into.data(), memory_.data() + sizeof(uint64_t) * (first - first_segment_),
                into.size_bytes());
    return OkStatus();
  }
  std::optional<kernels::BothSums> CopyAndSum(uint32_t, device::Bytes, device::ConstBytes,
                                              const SegmentCopy&) override {
    return std::nullopt;
  }

 private:
  const std::span<const std::byte> memory_;
  const uint32_t first_segment_;
};

}  // namespace

std::unique_ptr<SourceSums> SumsIn(std::span<const std::byte> memory, const plan::SlotSpan& slot) {
  return std::make_unique<MadeSums>(memory, slot.first_segment);
}

Status OwnSums::Sum(uint32_t first, std::span<uint64_t> into) {
  const std::span own = std::span(sums_).subspan(first, into.size());
  WW_RETURN_IF_ERROR(SumSegments(stream_, schedule_, first, binding_, known_, own));
  std::ranges::copy(own, into.begin());
  return OkStatus();
}

std::optional<kernels::BothSums> OwnSums::CopyAndSum(uint32_t segment, device::Bytes target,
                                                     device::ConstBytes source,
                                                     const SegmentCopy& copy) {
  if (Has(segment)) return std::nullopt;
  const plan::CopyOp& op = stream_.ops[schedule_.segments[segment].op_index];
  const SegmentCopy own = CopyOf(op, schedule_.segments[segment]);
  const device::Bytes seen = binding_[op.source_tensor].at() + own.source_offset;
  const bool on_host = !target.device && !source.device && !seen.device;
  if (!on_host || !ReadAlike(copy, own)) return std::nullopt;
  const kernels::BothSums sums =
      kernels::CopyAndSumBoth(target.at, source.at, seen.at, copy.box, copy.from, copy.to);
  sums_[segment] = sums.source;
  return sums;
}

}  // namespace weightwire::transfer
