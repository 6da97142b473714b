#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/delta.h"
#include "kernels/four_bit.h"
#include "kernels/kernels.h"
#include "kernels/quantize.h"
#include "server/device/device.h"

/// kernels/kernels.h on bytes of the host or of a GPU, whichever they are of: the same results, and
/// the one way to touch bytes that may be a GPU's. Each call blocks until its bytes are there; runs
/// on any thread. Device memory must be aligned to its elements.
///
/// Between host and GPU, or two GPUs, bytes go packed and cast through a lane (device.h), so that
/// the host never reads over the bus element by element. A box that is larger than a lane goes in
/// parts.
///
///   kInternal / kIoError  the GPU failed: names it and the call. What was written is undefined.
namespace weightwire::device {

/// `device` null: host memory. Else that device's, for it alone to touch.
struct Bytes {
  std::byte* at = nullptr;
  Device* device = nullptr;
  friend Bytes operator+(Bytes bytes, uint64_t offset) { return {bytes.at + offset, bytes.device}; }
};
struct ConstBytes {
  const std::byte* at = nullptr;
  Device* device = nullptr;
  ConstBytes(const std::byte* where, Device* whose = nullptr) : at(where), device(whose) {}
  ConstBytes(const Bytes& bytes) : at(bytes.at), device(bytes.device) {}
  friend ConstBytes operator+(ConstBytes bytes, uint64_t offset) {
    return {bytes.at + offset, bytes.device};
  }
};

Result<uint64_t> SumSource(ConstBytes source, const kernels::StridedBox& box, kernels::Element from,
                           kernels::Element to);
Result<uint64_t> SumTarget(ConstBytes target, const kernels::StridedBox& box,
                           kernels::Element element);
Status Copy(Bytes target, ConstBytes source, const kernels::StridedBox& box, kernels::Element from,
            kernels::Element to);
/// The sum of what was written, read again where it lies; never of a second look at the source.
Result<uint64_t> CopyAndSumTarget(Bytes target, ConstBytes source, const kernels::StridedBox& box,
                                  kernels::Element from, kernels::Element to);
/// The same of several, none of which touches what another one writes: one sum for each in `sums`.
/// What lies within one GPU goes in few launches, and is waited for once: a GPU sums many at a time
/// or slowly.
struct CopyJob {
  Bytes target;
  ConstBytes source;
  kernels::StridedBox box;
  kernels::Element from{};
  kernels::Element to{};
};
Status CopyAndSumTargets(std::span<const CopyJob> jobs, std::span<uint64_t> sums);
/// SumSource of each job's source. Targets are not looked at.
Status SumSources(std::span<const CopyJob> jobs, std::span<uint64_t> sums);

/// kernels::QuantizeE4M3 of `codes` alone, or of `scale_inv` alone. On the source's GPU where the
/// source is a GPU's, so that its floats do not leave it; else on the host. Parts that go through a
/// lane are of whole blocks.
///   kResourceExhausted / kLimitExceeded  a block of codes that goes through a lane is larger
Status QuantizeCodes(Bytes codes, ConstBytes source, const kernels::QuantizeBox& box,
                     kernels::Element from);
Status QuantizeScales(Bytes scale_inv, ConstBytes source, const kernels::QuantizeBox& box,
                      kernels::Element from);
/// kernels::QuantizeFourBit likewise, of kinds without a global scale and groups of 1 ×
/// `box.block_columns`. Codes lie in units of `code_bytes`, 1 or 4, by which
/// `box.target_stride` counts.
Status QuantizeFourBitCodes(Bytes codes, ConstBytes source, const kernels::QuantizeBox& box,
                            kernels::Element from, kernels::FourBitKind kind, int code_bytes);
Status QuantizeFourBitScales(Bytes scales, ConstBytes source, const kernels::QuantizeBox& box,
                             kernels::Element from, kernels::FourBitKind kind);

/// kernels::DeltaScan of two arrays of the host, or of one GPU, into streams of the host. `copy`:
/// `base` holds `now` in the end, also where the answer is false.
///   kResourceExhausted / kLimitExceeded  streams of `changes_max` do not fit a lane; nothing
///   changed
Result<bool> DeltaScan(kernels::DeltaOrder order, Bytes base, ConstBytes now, size_t elements,
                       size_t changes_max, kernels::DeltaStreams& out, bool copy);
/// kernels::DeltaApply of streams of the host.
///   kResourceExhausted / kLimitExceeded  the streams do not fit a lane; nothing changed
Result<bool> DeltaApply(kernels::DeltaOrder order, Bytes target, size_t elements,
                        const kernels::DeltaStreams& delta);

/// `bytes` that lie together on both sides.
Status CopyRun(Bytes target, ConstBytes source, uint64_t bytes);

}  // namespace weightwire::device
