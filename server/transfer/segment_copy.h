#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/four_bit.h"
#include "kernels/kernels.h"
#include "kernels/quantize.h"
#include "server/base/status.h"
#include "server/plan/plan.h"
#include "server/plan/segments.h"
#include "server/transfer/transfer.h"

/// Geometry of one segment: plan's elements turned into the bytes and boxes that kernels take.
namespace weightwire::transfer {

/// Where a segment's elements lie on both sides. Byte offsets are within the op's tensors.
struct SegmentCopy {
  kernels::StridedBox box;  ///< source and target strides
  kernels::Element from{};
  kernels::Element to{};  ///< also the kind on the wire
  uint64_t source_offset = 0;
  uint64_t target_offset = 0;
  plan::Transform transform = plan::Transform::kElements;
  /// What is quantized, without the strides of what is made: then `box` is of codes or of scales,
  /// and its source strides mean nothing.
  kernels::QuantizeBox matrix;
  /// Of codes and scales of four bits; then `matrix` has no kind of scales.
  std::optional<kernels::FourBitKind> four_bits = std::nullopt;
};
SegmentCopy CopyOf(const plan::CopyOp& op, const plan::Segment& segment);

/// Segment `index` of a stream, the op that it is of, and how it is copied.
struct SegmentParts {
  const plan::CopyOp& op;
  const plan::Segment& segment;
  SegmentCopy copy;
};
SegmentParts PartsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                     uint32_t index);

/// Of a segment's first bytes: enough to find a difference in what training has changed, if only in
/// one element of a hundred.
inline constexpr int64_t kHeadBytes = 4096;

/// True when the source's elements may be sent from where they lie: nothing is made of them, no
/// cast, and runs of at least `run_bytes_min`.
bool SourceIsDirect(const SegmentCopy& copy, int64_t run_bytes_min);
/// True when wire bytes may be received where they belong: runs of at least `run_bytes_min`.
bool TargetIsDirect(const SegmentCopy& copy, int64_t run_bytes_min);

/// True when both read the same elements in the same order from their sources, and make the same
/// copies or casts of them.
bool ReadAlike(const SegmentCopy& a, const SegmentCopy& b);

/// Bytes that lie together.
struct Run {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
/// The segment's elements in packed order, as runs within its source (target) tensor.
std::vector<Run> SourceRuns(const SegmentCopy& copy);
std::vector<Run> TargetRuns(const SegmentCopy& copy);

/// The op's canonical name, for messages; "#index" where the slice has none.
std::string TensorName(const plan::RankSlice& slice, const plan::CopyOp& op);

/// Proves that every op of `slice` stays inside the bound tensors of its own side (of both, where
/// it is made of what is gathered) and that kernels can do it: what follows trusts it.
///   kInvalidArgument / kInvalidRequest  ndim, extents, strides, dtypes or blocks out of range
///   kInvalidArgument / kMemoryInvalid   a tensor is not bound, or an op leaves it
/// The failure names the tensor.
Status ValidateSlice(const plan::RankSlice& slice, const Binding& binding);

/// Whether segments of this size take what they must take whole.
///   kFailedPrecondition / kConfigInvalid  a block of fp8 codes has more bytes: names the tensor
Status CheckBlocksFit(const plan::RankSlice& slice, int64_t segment_bytes_max);

/// The same for what a peer has mapped for us: `tensor_bytes` by source tensor.
Status ValidateSourceSide(const plan::Stream& stream, const std::vector<uint64_t>& tensor_bytes);

}  // namespace weightwire::transfer
