#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/layout/types.h"

/// Layouts × layouts → who sends which box to whom. Pure and address-free.
namespace weightwire::plan {

/// What the source makes of the elements that it sends.
enum class Transform : int {
  kElements = 0,  ///< the same ones, cast where the dtypes differ
  kCodes = 1,     ///< fp8 codes: one for each element
  kScales = 2,    ///< scales: one for each block of elements
};

/// One strided block that moves from a tensor of the source rank to a tensor of the target rank.
///
/// Element (i…) is at `source_offset + Σ i·source_stride` of the source tensor's storage and at
/// `target_offset + Σ i·target_stride` of the target's. Offsets and strides are in elements.
/// There is one extent and stride per dimension of the canonical tensor, so the block is also a box
/// of it. Packed order is row-major over `extent`: both sides agree on it without talking.
struct CopyOp {
  uint32_t canonical = 0;      ///< canonical tensor (of a slice: in its names), for messages
  uint32_t source_tensor = 0;  ///< index into RankLayout::tensors of the source rank
  uint32_t target_tensor = 0;  ///< index into RankLayout::tensors of the target rank
  layout::DType source_dtype = layout::DType::kBF16;
  layout::DType target_dtype = layout::DType::kBF16;  ///< also the dtype on the wire
  std::vector<int64_t> extent;
  int64_t source_offset = 0;
  std::vector<int64_t> source_stride;
  int64_t target_offset = 0;
  std::vector<int64_t> target_stride;
  /// A weight that becomes fp8 on the way (kernels/quantize.h) has two kinds of copies: kCodes and,
  /// for the tensor of its scales, kScales. Both read floats of the same matrix, whole blocks of it
  /// only, so that the source alone knows the largest magnitude of each.
  Transform transform = Transform::kElements;
  /// How the scales of what is made follow from their blocks.
  layout::ScaleRule rule = layout::ScaleRule::kQuotient;
  /// Rows and columns of a block that shares one scale; the copy begins at one. With kCodes, and
  /// with kElements where codes are passed on, a segment is made of whole blocks. Else empty.
  std::vector<int64_t> block = {};
  /// kScales: rows and columns at the source, of which `extent` are the blocks. Else empty.
  std::vector<int64_t> source_extent = {};
  friend bool operator==(const CopyOp&, const CopyOp&) = default;
};
/// `transform` and `rule` as one number, as it travels (proto weightwire.v1.Makes).
int MakesNumber(const CopyOp& op);
/// Sets both; false when there is no such number.
bool SetMakes(int number, CopyOp& op);
/// What the copy reads, along `source_stride`.
const std::vector<int64_t>& SourceExtent(const CopyOp& op);
int64_t ElementCount(const CopyOp& op);
/// Bytes on the wire: elements × bytes of target_dtype.
int64_t WireBytes(const CopyOp& op);

/// Everything that one source rank sends to one target rank, in the global order of the plan.
struct Stream {
  uint32_t id = 0;  ///< index into TransferPlan::streams
  uint32_t source_rank = 0;
  uint32_t target_rank = 0;
  int64_t bytes = 0;  ///< Σ WireBytes
  std::vector<CopyOp> ops;
  friend bool operator==(const Stream&, const Stream&) = default;
};

/// What a target rank quantizes itself: blocks of which no source rank holds all in one piece.
///
/// Their elements travel as floats, into memory of the target's that is no tensor: one row of
/// `elements` in `dtype`, which copies name as the local tensor behind the rank's last one. When
/// all streams of the rank are there, the copies `made` are done within the rank: kCodes and
/// kScales that read that memory (`source_tensor` names it, too) and write the rank's tensors.
struct GatherBuffer {
  layout::DType dtype = layout::DType::kBF16;  ///< that of the source, or F32 where it has several
  int64_t elements = 0;                        ///< 0: nothing is gathered
  std::vector<CopyOp> made = {};
  friend bool operator==(const GatherBuffer&, const GatherBuffer&) = default;
};
int64_t GatherBufferBytes(const GatherBuffer& gathered);

/// How to fill every rank of a target layout from the ranks of a source layout.
struct TransferPlan {
  PlanId id;
  layout::Fingerprint source;
  layout::Fingerprint target;
  uint32_t source_ranks = 0;
  uint32_t target_ranks = 0;
  int64_t bytes_total = 0;
  uint64_t copies_total = 0;
  std::vector<std::string> tensor_names;           ///< canonical names, by CopyOp::canonical
  std::vector<Stream> streams;                     ///< by (target_rank, source_rank); none is empty
  std::map<uint32_t, GatherBuffer> gathered = {};  ///< by target rank, of those that gather
  friend bool operator==(const TransferPlan&, const TransferPlan&) = default;
};

enum class Side : int { kSource = 1, kTarget = 2 };

/// What one rank needs of a plan: its own streams and the names that failures mention. Its copies'
/// `canonical` counts in the slice's own list of names: a plan of a large model has very many, of
/// which a rank needs few.
struct RankSlice {
  PlanId plan;
  Side side = Side::kSource;
  uint32_t rank = 0;
  std::vector<Stream> streams;
  std::vector<std::string> tensor_names;  ///< that its copies name, each once, in the plan's order
  GatherBuffer gathered = {};             ///< side kTarget
  friend bool operator==(const RankSlice&, const RankSlice&) = default;
};
RankSlice SliceOf(const TransferPlan& plan, Side side, uint32_t rank);
/// Gives a slice, whose copies name canonical tensors of a whole model, the names of those and
/// `canonical` as an index into them. `name_of`: the name of a canonical tensor.
void TakeNames(RankSlice& slice, const std::function<const std::string&(uint32_t)>& name_of);

struct PlanOptions {
  uint64_t copies_max = 50'000'000;
  uint64_t streams_max = 4'000'000;
};

/// Chooses, for every box of every target rank, a source rank that holds it.
///
/// An element may come from any source rank that holds it, in shards of equal boxes (replicas) or
/// of others that overlap; a target element is read once. Ranks are chosen so that the busiest
/// source sends at most about 1 % more than the least possible for these layouts; a large copy is
/// cut where that is needed (where single elements weigh more than 1 %, by no more than one of
/// them; codes are cut at blocks).
///
/// A weight that is BF16, F16 or F32 at the source and F8_E4M3 with a `block` at the target, and
/// whose scales the source lacks, becomes codes and scales on the way, by the target's rule. A
/// block of which all lies in one piece of a source rank is quantized there; what lies in several
/// is gathered, as floats, by every target rank that holds it, and quantized there (GatherBuffer).
///
/// Guarantee: every element that a target piece covers is written exactly once, from a rank that
/// holds it (VerifyPlan proves it with code of its own).
/// Pure: equal inputs give an equal plan, id included, in every process. The id covers both
/// fingerprints, the options and a planner version.
///
///   kFailedPrecondition / kUnownedElement   names the tensor, target rank and missing box
///   kFailedPrecondition / kDtypeMismatch    no cast is known between the dtypes
///   kFailedPrecondition / kShapeMismatch    a canonical tensor differs in shape between sides; a
///                                           target piece cuts a block to quantize
///   kFailedPrecondition / kTensorMissing    a target tensor is not in the source's canonical space
///                                           or codes are wanted without scales, or the reverse
///   kInvalidArgument / kOverlappingShards   target pieces of one rank overlap in local storage
///   kResourceExhausted / kLimitExceeded     see PlanOptions
///   as layout::Validate                     a layout is not valid in itself
Result<TransferPlan> BuildPlan(const layout::ModelLayout& source, const layout::ModelLayout& target,
                               const PlanOptions& options = {});

/// Proves the guarantee above for a given plan and valid layouts, sharing no code with BuildPlan:
/// every target element covered by a piece is written exactly once and from the same canonical
/// element; every read stays inside a source piece; what is quantized is whole blocks of the
/// canonical tensor, and scales are of the same elements as their codes; of what is gathered, every
/// element that is quantized is written exactly once, and in a dtype that loses nothing. Cost
/// O(copies · log copies).
///   kInternal  names stream, op, tensor and what is wrong
Status VerifyPlan(const TransferPlan& plan, const layout::ModelLayout& source,
                  const layout::ModelLayout& target);

/// Figures of a plan for people and machines.
struct PlanReport {
  int64_t bytes_total = 0;
  uint64_t copies = 0;
  uint32_t streams = 0;
  int64_t egress_max = 0;   ///< most bytes that one source rank sends
  int64_t ingress_max = 0;  ///< most bytes that one target rank receives
  /// The least egress_max of any plan: every byte sent by any of its holders, in any fraction.
  /// Exact, from the layouts alone, by maximum flows (min_max_load.h), with nothing of the
  /// planner's.
  double egress_bound = 0;
  /// The largest target rank's own bytes, where blocks that it gathers count as floats.
  double ingress_bound = 0;
  /// Maximum over bound; 1.0 is perfect, and always so for ingress, else a defect. 1.0 for a plan
  /// without bytes.
  double egress_over_bound = 0;
  double ingress_over_bound = 0;
  /// Time of a fluid simulation over the greater of the two bounds: equal link rates at every rank,
  /// full duplex, all streams started together and sharing links by bytes, as the transfer engine
  /// has it (fluid.h).
  double simulated_over_bound = 0;
  std::vector<int64_t> egress;   ///< by source rank
  std::vector<int64_t> ingress;  ///< by target rank
};
/// `plan` must be BuildPlan's for these layouts, or have passed VerifyPlan.
PlanReport Report(const TransferPlan& plan, const layout::ModelLayout& source,
                  const layout::ModelLayout& target);

}  // namespace weightwire::plan
