// How a plan is made.
//
// 1. Per canonical tensor, the pieces of all source ranks are cut into disjoint owners, each with
// the
//    ranks that hold it (owners.h).
// 2. Each target box is met with the owners near it. They are disjoint, so an element is read once,
//    and what the common blocks do not add up to is held by nobody. Where a weight is quantized,
//    blocks that no owner holds whole are gathered: copies of floats, and codes and scales that the
//    target makes of them.
// 3. Holders are chosen last, when all copies are known (choose_holders.cc).
// 4. Copies are handed out to streams in the global order (canonical tensor, target tensor, target
//    offset); one that continues the stream's last copy on both sides is merged into it.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/plan/block_split.h"
#include "server/plan/casts.h"
#include "server/plan/owners.h"
#include "server/plan/pending_copies.h"
#include "server/plan/plan.h"
#include "server/plan/quantization.h"
#include "server/plan/refusals.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::DType;
using layout::ModelLayout;
using layout::Piece;

/// Raise it when equal inputs would give another plan than before.
constexpr std::string_view kPlannerVersion = "weightwire.plan.2";

/// In elements, so that what is gathered for one weight begins where wide loads may.
constexpr int64_t kGatherAlignment = 64;

int64_t OffsetOf(const Piece& piece, std::span<const int64_t> begin) {
  int64_t offset = piece.local_offset;
  for (size_t d = 0; d < begin.size(); ++d) {
    offset += (begin[d] - piece.box.begin[d]) * piece.local_stride[d];
  }
  return offset;
}

/// The dimension along which `next` continues `last`; nullopt when they are not one block.
std::optional<size_t> Continuation(const Box& last, const Box& next) {
  std::optional<size_t> along;
  for (size_t d = 0; d < last.begin.size(); ++d) {
    if (last.begin[d] == next.begin[d] && last.extent[d] == next.extent[d]) continue;
    if (along || next.begin[d] != last.begin[d] + last.extent[d]) return std::nullopt;
    along = d;
  }
  return along;
}

/// Grows `last`, which covers `last_box`, by `next` when they are one strided block of the
/// canonical tensor and of both storages.
bool Merge(CopyOp& last, Box& last_box, const CopyOp& next, const Box& next_box) {
  if (last.canonical != next.canonical || last.source_tensor != next.source_tensor ||
      last.target_tensor != next.target_tensor || last.source_stride != next.source_stride ||
      last.target_stride != next.target_stride) {
    return false;
  }
  const std::optional<size_t> d = Continuation(last_box, next_box);
  if (!d || next.target_offset != last.target_offset + last.extent[*d] * last.target_stride[*d] ||
      next.source_offset != last.source_offset + SourceExtent(last)[*d] * last.source_stride[*d]) {
    return false;
  }
  last.extent[*d] += next.extent[*d];
  if (!last.source_extent.empty()) last.source_extent[*d] += next.source_extent[*d];
  last_box.extent = last.extent;
  return true;
}

class Planner {
 public:
  Planner(const ModelLayout& source, const ModelLayout& target, const PlanOptions& options)
      : source_(source),
        target_(target),
        options_(options),
        source_pieces_(source),
        target_pieces_(target),
        book_(source) {}

  Result<TransferPlan> Build() {
    for (uint32_t t = 0; t < target_.canonical.tensors.size(); ++t) {
      WW_FAIL_IF_ERROR(DraftTensor(t));
    }
    ChooseHolders(target_, book_, static_cast<uint32_t>(source_.ranks.size()), list_);
    WW_FAIL_IF_ERROR(CheckCopies(list_.copies.size()));
    return Emit();
  }

 private:
  /// What a target tensor is made of.
  struct Origin {
    uint32_t tensor = 0;                            ///< canonical, of the source
    Transform transform = Transform::kElements;     ///< kCodes of what is packed, kScales, or what
                                                    ///< the dtypes say
    const layout::TensorSpec* quantized = nullptr;  ///< the weight, where it may be, unpacked
  };
  /// `same`: the tensor of its name at the source.
  std::optional<Origin> OriginOf(uint32_t canonical, std::optional<uint32_t> same) {
    const layout::TensorSpec& spec = target_.canonical.tensors[canonical];
    if (same) return Origin{*same, Transform::kElements, spec.block.empty() ? nullptr : &spec};
    const bool packed = spec.packed > 1;
    const auto weight = packed ? canonical : target_.canonical.WeightOf(canonical);
    if (!weight) return std::nullopt;
    const layout::TensorSpec& quantized = UnpackedOf(*weight);
    const auto unquantized = source_.canonical.Find(quantized.name);
    if (!unquantized) return std::nullopt;
    return Origin{*unquantized, packed ? Transform::kCodes : Transform::kScales, &quantized};
  }

  /// The target's weight as what it is made of.
  const layout::TensorSpec& UnpackedOf(uint32_t weight) {
    const layout::TensorSpec& spec = target_.canonical.tensors[weight];
    if (spec.packed == 1) return spec;
    const auto [at, added] = unpacked_.try_emplace(weight);
    if (added) at->second = Unpacked(spec);
    return at->second;
  }

  Status DraftTensor(uint32_t canonical) {
    const layout::TensorSpec& spec = target_.canonical.tensors[canonical];
    const std::optional<uint32_t> found = source_.canonical.Find(spec.name);
    const std::span<PieceRef> wanted = target_pieces_.Of(canonical);
    if (found && source_.canonical.tensors[*found].shape != spec.shape) {
      const bool unpacked = source_.canonical.tensors[*found].packed == 1;
      if (unpacked && layout::IsNvFp4(spec.scale_rule)) return NeedsWholeTensor(spec);
      return OtherShape(spec, source_.canonical.tensors[*found].shape);
    }
    if (wanted.empty()) return OkStatus();
    if (found) WW_RETURN_IF_ERROR(CheckRules(source_.canonical.tensors[*found], spec));
    const std::optional<Origin> origin = OriginOf(canonical, found);
    if (!origin) return NoSuchTensor(spec, wanted[0].rank, source_.canonical, target_.canonical);
    if (origin->transform != Transform::kElements) {
      WW_RETURN_IF_ERROR(CheckFourBits(*origin));
    }
    const OwnerIndex index(book_.Cut(source_pieces_.Of(origin->tensor)));
    std::vector<PendingCopy>& copies = list_.copies;
    const auto first = static_cast<ptrdiff_t>(copies.size());
    for (const PieceRef& ref : wanted) {
      WW_RETURN_IF_ERROR(DraftPiece(canonical, ref, *origin, index));
    }
    std::sort(copies.begin() + first, copies.end(), InGlobalOrder);
    return OkStatus();
  }

  /// Weights whose scales follow other rules are other numbers than the engine would have made.
  static Status CheckRules(const layout::TensorSpec& source, const layout::TensorSpec& target) {
    const bool known = !source.block.empty() && !target.block.empty();
    return known && source.scale_rule != target.scale_rule ? OtherRule(target) : OkStatus();
  }

  /// What is made by another name, of a tensor of the weight's shape.
  Status CheckFourBits(const Origin& origin) const {
    const layout::TensorSpec& weight = *origin.quantized;
    if (layout::IsNvFp4(weight.scale_rule)) return NeedsWholeTensor(weight);
    const layout::Shape& shape = source_.canonical.tensors[origin.tensor].shape;
    return shape == weight.shape ? OkStatus() : OtherShape(weight, shape);
  }

  Status DraftPiece(uint32_t canonical, const PieceRef& ref, Origin origin,
                    const OwnerIndex& index) {
    const layout::TensorSpec& spec = target_.canonical.tensors[canonical];
    const bool scales = origin.transform == Transform::kScales;
    const bool packs = origin.transform == Transform::kCodes;
    const Box& piece = PieceOf(target_, ref).box;
    const Box box = scales  ? ElementsOf(*origin.quantized, piece)
                    : packs ? Unpacked(spec, piece)
                            : piece;
    int64_t missing = layout::ElementCount(box);
    bool straddles = false;
    for (const Owner& owner : index.Candidates(box)) {
      const std::optional<Box> part = layout::Intersect(box, owner.box);
      if (!part) continue;
      missing -= layout::ElementCount(*part);
      if (!scales && !packs) origin.transform = TransformOf(ref, origin, owner);
      std::optional<Box> drafted = part;
      if (origin.transform != Transform::kElements) {
        WW_RETURN_IF_ERROR(CheckQuantized(canonical, ref, *origin.quantized, box));
        drafted = WholeBlocksIn(*origin.quantized, *part);
        straddles = straddles || drafted != part;
      }
      WW_RETURN_IF_ERROR(CheckDtypes(spec, ref, origin.transform, TensorOf(target_, ref).dtype,
                                     owner,
                                     origin.quantized == nullptr ? layout::ScaleRule::kQuotient
                                                                 : origin.quantized->scale_rule));
      if (drafted) {
        WW_RETURN_IF_ERROR(AddCopy(canonical, ref, origin.transform, owner,
                                   scales  ? ScalesOf(*origin.quantized, *drafted)
                                   : packs ? Packed(spec, *drafted)
                                           : *drafted));
      }
      if (missing == 0) break;
    }
    if (missing != 0) return Unowned(spec, ref.rank, box, index);
    if (!straddles) return OkStatus();
    return scales ? MakeScales(canonical, ref, box) : GatherAndMake(canonical, ref, box, index);
  }

  /// The blocks of a piece of codes, which are of the elements `box`, that straddle owners.
  Status GatherAndMake(uint32_t canonical, const PieceRef& ref, const Box& box,
                       const OwnerIndex& index) {
    for (const Box& blocks : SplitBlocks(UnpackedOf(canonical), box, index)) {
      std::vector<uint32_t>& known = gathers_of_[{ref.rank, canonical}];
      // Another piece of the rank may hold the same: then what it gathers serves both.
      const auto holds = std::ranges::find_if(known, [&](uint32_t gather) {
        return layout::Intersect(list_.gathers[gather].box, blocks) == blocks;
      });
      const uint32_t gather =
          holds != known.end() ? *holds : static_cast<uint32_t>(list_.gathers.size());
      if (holds == known.end()) {
        known.push_back(gather);
        WW_RETURN_IF_ERROR(AddGather(canonical, ref.rank, blocks, index));
      }
      WW_RETURN_IF_ERROR(AddMade(canonical, ref, Transform::kCodes, list_.gathers[gather], blocks));
    }
    return OkStatus();
  }

  /// The scales of `box` whose blocks the rank gathers: it holds their codes, which came first.
  Status MakeScales(uint32_t canonical, const PieceRef& ref, const Box& box) {
    const uint32_t weight = *target_.canonical.WeightOf(canonical);
    for (uint32_t index : gathers_of_[{ref.rank, weight}]) {
      const Gather& gather = list_.gathers[index];
      if (const auto blocks = layout::Intersect(gather.box, box)) {
        WW_RETURN_IF_ERROR(AddMade(canonical, ref, Transform::kScales, gather, *blocks));
      }
    }
    return OkStatus();
  }

  Transform TransformOf(const PieceRef& ref, const Origin& origin, const Owner& owner) const {
    const layout::DType to = TensorOf(target_, ref).dtype;
    const bool quantizes = origin.quantized != nullptr && to == layout::DType::kF8E4M3 &&
                           (owner.dtypes & 1u << static_cast<int>(to)) == 0;
    return quantizes ? Transform::kCodes : Transform::kElements;
  }

  /// What is made of one source must agree: the target holds whole blocks, and for each of them the
  /// codes and their scale on one rank; the source has no scales of its own.
  /// `box`: what the piece is made of.
  Status CheckQuantized(uint32_t canonical, const PieceRef& ref, const layout::TensorSpec& weight,
                        const Box& box) {
    const Box& held = PieceOf(target_, ref).box;
    const auto& tensors = target_.canonical.tensors;
    const bool is_codes = !tensors[canonical].block.empty();
    if (is_codes && !IsWholeBlocks(weight, box)) return CutsBlocks(weight, ref.rank, box);
    if (const auto other = source_.canonical.ScalesOf(weight.name)) {
      return HasScales(weight, source_.canonical.tensors[*other].name);
    }
    const std::string& scales = tensors[*target_.canonical.ScalesOf(weight.name)].name;
    const uint32_t stored = is_codes ? canonical : *target_.canonical.WeightOf(canonical);
    const std::string& partner = is_codes ? scales : tensors[stored].name;
    const Box wanted = is_codes ? ScalesOf(weight, box) : Packed(tensors[stored], box);
    const auto pieces = target_pieces_.Of(*target_.canonical.Find(partner));
    const auto first =
        std::lower_bound(pieces.begin(), pieces.end(), ref.rank,
                         [](const PieceRef& p, uint32_t rank) { return p.rank < rank; });
    for (auto at = first; at != pieces.end() && at->rank == ref.rank; ++at) {
      if (layout::Intersect(PieceOf(target_, *at).box, wanted) == wanted) return OkStatus();
    }
    return LacksPartner(tensors[canonical], ref.rank, held, partner);
  }

  /// That of every source of a weight that may be gathered, or F32, which holds each of them.
  DType GatherDType() {
    if (gather_dtype_) return *gather_dtype_;
    for (const layout::TensorSpec& spec : target_.canonical.tensors) {
      const auto found =
          source_.canonical.Find(spec.packed > 1 ? layout::UnpackedName(spec.name) : spec.name);
      if (spec.block.empty() || !found) continue;
      for (const PieceRef& piece : source_pieces_.Of(*found)) {
        const DType dtype = TensorOf(source_, piece).dtype;
        gather_dtype_ = gather_dtype_.value_or(dtype) == dtype ? dtype : DType::kF32;
      }
    }
    return *gather_dtype_;
  }

  /// `blocks` of the weight `canonical` for target rank `rank`, and the copies that fill them.
  Status AddGather(uint32_t canonical, uint32_t rank, const Box& blocks, const OwnerIndex& index) {
    const layout::TensorSpec& weight = target_.canonical.tensors[canonical];
    GatherBuffer& gathered = gathered_[rank];
    gathered.dtype = GatherDType();
    Gather gather{rank, canonical, blocks, 0, {blocks.extent[1], 1}};
    int64_t end = 0;
    if (__builtin_add_overflow(gathered.elements, kGatherAlignment - 1, &gather.offset)) {
      return TooManyBytes();
    }
    gather.offset -= gather.offset % kGatherAlignment;
    if (__builtin_add_overflow(gather.offset, layout::ElementCount(blocks), &end)) {
      return TooManyBytes();
    }
    gathered.elements = end;
    const auto number = static_cast<uint32_t>(list_.gathers.size());
    list_.gathers.push_back(std::move(gather));
    const auto tensor = static_cast<uint32_t>(target_.ranks[rank].tensors.size());
    for (const Owner& owner : index.Candidates(blocks)) {
      const std::optional<Box> part = layout::Intersect(blocks, owner.box);
      if (!part) continue;
      const PieceRef there{rank, tensor, 0};
      WW_RETURN_IF_ERROR(CheckDtypes(weight, there, Transform::kElements, gathered.dtype, owner));
      PendingCopy pending;
      pending.gather = number;
      pending.target_offset = OffsetIn(list_.gathers[number], part->begin);
      WW_RETURN_IF_ERROR(
          AddCopy(pending, canonical, there, Transform::kElements, gathered.dtype, owner, *part));
    }
    return OkStatus();
  }

  static int64_t OffsetIn(const Gather& gather, std::span<const int64_t> begin) {
    int64_t offset = gather.offset;
    for (size_t d = 0; d < begin.size(); ++d) {
      offset += (begin[d] - gather.box.begin[d]) * gather.stride[d];
    }
    return offset;
  }

  /// What the rank makes of `blocks` for the piece `ref` of a tensor of codes or scales.
  Status AddMade(uint32_t canonical, const PieceRef& ref, Transform transform, const Gather& gather,
                 const Box& blocks) {
    const layout::TensorSpec& stored = target_.canonical.tensors[gather.canonical];
    const layout::TensorSpec& weight = UnpackedOf(gather.canonical);
    const Piece& to = PieceOf(target_, ref);
    const bool scales = transform == Transform::kScales;
    const Box box = scales ? ScalesOf(weight, blocks) : Packed(stored, blocks);
    WW_RETURN_IF_ERROR(CheckCopies(list_.copies.size() + ++made_count_));
    CopyOp op;
    op.canonical = canonical;
    op.source_tensor = static_cast<uint32_t>(target_.ranks[ref.rank].tensors.size());
    op.target_tensor = ref.tensor;
    op.source_dtype = gathered_[ref.rank].dtype;
    op.target_dtype = TensorOf(target_, ref).dtype;
    op.extent = box.extent;
    op.source_offset = OffsetIn(gather, blocks.begin);
    op.source_stride = gather.stride;
    op.target_offset = OffsetOf(to, box.begin);
    op.target_stride = to.local_stride;
    op.transform = transform;
    op.block = scales ? weight.block : stored.block;
    op.rule = weight.scale_rule;
    if (!CanMake(transform, op.rule, op.source_dtype, op.target_dtype)) {  // gathered in F32
      return NoCast(weight, ref.rank, op.source_dtype, ref.rank, op.target_dtype);
    }
    if (scales || stored.packed > 1) op.source_extent = blocks.extent;
    gathered_[ref.rank].made.push_back(std::move(op));
    return OkStatus();
  }

  static Status TooManyBytes() {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan's bytes do not fit 63 bits");
  }

  Status CheckCopies(size_t copies) const {
    if (copies <= options_.copies_max) return OkStatus();
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan needs more than " + std::to_string(options_.copies_max) + " copies");
  }

  Status AddCopy(uint32_t canonical, const PieceRef& ref, Transform transform, const Owner& owner,
                 const Box& box) {
    PendingCopy pending;
    pending.target_offset = OffsetOf(PieceOf(target_, ref), box.begin);
    return AddCopy(pending, canonical, ref, transform, TensorOf(target_, ref).dtype, owner, box);
  }

  /// `pending` knows where it goes.
  Status AddCopy(PendingCopy pending, uint32_t canonical, const PieceRef& ref, Transform transform,
                 DType dtype, const Owner& owner, const Box& box) {
    WW_RETURN_IF_ERROR(CheckCopies(list_.copies.size() + made_count_ + 1));
    pending.canonical = canonical;
    pending.transform = transform;
    pending.target = ref;
    pending.set = owner.set;
    pending.holders_at = owner.holders_at;
    pending.box_at = list_.boxes.size();
    pending.bytes = layout::ElementCount(box) * layout::ElementBytes(dtype);
    if (__builtin_add_overflow(bytes_total_, pending.bytes, &bytes_total_)) {
      return TooManyBytes();
    }
    list_.boxes.insert(list_.boxes.end(), box.begin.begin(), box.begin.end());
    list_.boxes.insert(list_.boxes.end(), box.extent.begin(), box.extent.end());
    list_.copies.push_back(pending);
    return OkStatus();
  }

  Status CheckDtypes(const layout::TensorSpec& spec, const PieceRef& ref, Transform transform,
                     DType to, const Owner& owner,
                     layout::ScaleRule rule = layout::ScaleRule::kQuotient) const {
    if (transform == Transform::kElements && owner.dtypes == 1u << static_cast<int>(to))
      return OkStatus();
    for (const PieceRef& holder : book_.HoldersOf(owner.holders_at, owner.set)) {
      const layout::DType from = TensorOf(source_, holder).dtype;
      const bool known = transform == Transform::kElements ? CastKnown(from, to)
                                                           : CanMake(transform, rule, from, to);
      if (known) continue;
      return transform == Transform::kScales && IsQuantizable(from)
                 ? NoScales(spec, holder.rank, from, ref.rank, to)
                 : NoCast(spec, holder.rank, from, ref.rank, to);
    }
    return OkStatus();
  }

  const PieceRef& HolderOf(const PendingCopy& pending) const {
    return book_.HoldersOf(pending.holders_at, pending.set)[pending.holder];
  }

  uint64_t StreamKey(const PendingCopy& pending) const {
    return uint64_t{pending.target.rank} << 32 | HolderOf(pending).rank;
  }

  Result<TransferPlan> Emit() {
    std::vector<uint64_t> keys;
    keys.reserve(list_.copies.size());
    for (const PendingCopy& pending : list_.copies) keys.push_back(StreamKey(pending));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    if (keys.size() > options_.streams_max) {
      return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan needs " + std::to_string(keys.size()) + " streams, more than " +
                      std::to_string(options_.streams_max));
    }
    TransferPlan plan = Head();
    plan.bytes_total = bytes_total_;
    plan.gathered = gathered_;
    std::unordered_map<uint64_t, uint32_t> stream_of;
    for (uint64_t key : keys) {
      Stream stream;
      stream.id = static_cast<uint32_t>(plan.streams.size());
      stream.source_rank = static_cast<uint32_t>(key);
      stream.target_rank = static_cast<uint32_t>(key >> 32);
      stream_of.emplace(key, stream.id);
      plan.streams.push_back(std::move(stream));
    }
    std::vector<Box> last_boxes(plan.streams.size());
    for (const PendingCopy& pending : list_.copies) {
      Stream& stream = plan.streams[stream_of.at(StreamKey(pending))];
      stream.bytes += pending.bytes;
      Box box = BoxOf(pending);
      CopyOp op = MakeOp(pending, box);
      Box& last_box = last_boxes[stream.id];
      if (!stream.ops.empty() && Merge(stream.ops.back(), last_box, op, box)) continue;
      stream.ops.push_back(std::move(op));
      last_box = std::move(box);
      ++plan.copies_total;
    }
    return plan;
  }

  Box BoxOf(const PendingCopy& pending) const {
    const size_t ndim = list_.TargetStride(target_, pending).size();
    const auto begin = list_.boxes.begin() + static_cast<ptrdiff_t>(pending.box_at);
    const auto extent = begin + static_cast<ptrdiff_t>(ndim);
    return {{begin, extent}, {extent, extent + static_cast<ptrdiff_t>(ndim)}};
  }

  CopyOp MakeOp(const PendingCopy& pending, const Box& box) {
    const PieceRef& holder = HolderOf(pending);
    const Piece& from = PieceOf(source_, holder);
    CopyOp op;
    op.canonical = pending.canonical;
    op.source_tensor = holder.tensor;
    op.target_tensor = pending.target.tensor;
    op.source_dtype = TensorOf(source_, holder).dtype;
    op.target_dtype = pending.gather ? gathered_.at(pending.target.rank).dtype
                                     : TensorOf(target_, pending.target).dtype;
    op.extent = box.extent;
    op.transform = pending.transform;
    op.source_offset = OffsetOf(from, SourceBox(op, box).begin);
    op.source_stride = from.local_stride;
    op.target_offset = pending.target_offset;
    op.target_stride = list_.TargetStride(target_, pending);
    return op;
  }

  /// Of what is made of `box`, what the copy reads; says so in the copy.
  Box SourceBox(CopyOp& op, const Box& box) {
    if (op.transform == Transform::kElements) return box;
    const bool scales = op.transform == Transform::kScales;
    const uint32_t weight = scales ? *target_.canonical.WeightOf(op.canonical) : op.canonical;
    const layout::TensorSpec& stored = target_.canonical.tensors[weight];
    op.block = scales ? UnpackedOf(weight).block : stored.block;
    op.rule = stored.scale_rule;
    if (!scales && stored.packed == 1) return box;
    Box elements = scales ? ElementsOf(UnpackedOf(weight), box) : Unpacked(stored, box);
    op.source_extent = elements.extent;
    return elements;
  }

  TransferPlan Head() const {
    TransferPlan plan;
    plan.source = layout::FingerprintOf(source_);
    plan.target = layout::FingerprintOf(target_);
    plan.source_ranks = static_cast<uint32_t>(source_.ranks.size());
    plan.target_ranks = static_cast<uint32_t>(target_.ranks.size());
    plan.id = IdOf(plan.source, plan.target, options_);
    for (const layout::TensorSpec& spec : target_.canonical.tensors) {
      plan.tensor_names.push_back(spec.name);
    }
    return plan;
  }

  static PlanId IdOf(const layout::Fingerprint& source, const layout::Fingerprint& target,
                     const PlanOptions& options) {
    std::string bytes(kPlannerVersion);
    for (uint64_t word : {source.high, source.low, target.high, target.low, options.copies_max,
                          options.streams_max}) {
      for (int shift = 0; shift < 64; shift += 8) {
        bytes.push_back(static_cast<char>(static_cast<uint8_t>(word >> shift)));
      }
    }
    const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
    return {hash.high64, hash.low64};
  }

  const ModelLayout& source_;
  const ModelLayout& target_;
  const PlanOptions options_;
  PiecesByCanonical source_pieces_;
  PiecesByCanonical target_pieces_;
  OwnerTable book_;
  PendingCopies list_;
  /// By target rank and weight: into PendingCopies::gathers.
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> gathers_of_;
  std::map<uint32_t, GatherBuffer> gathered_;  ///< by target rank
  std::optional<DType> gather_dtype_;
  std::map<uint32_t, layout::TensorSpec> unpacked_;  ///< by target weight, of packed ones
  size_t made_count_ = 0;                            ///< copies of all `gathered_`
  int64_t bytes_total_ = 0;
};

Status CheckLayout(const ModelLayout& layout, std::string_view side) {
  const Status status = layout::Validate(layout);
  if (status.ok()) return status;
  return Status(status.code(), status.reason(), std::string(side) + " layout: " + status.message())
      .AtRank(status.rank())
      .AtTensor(status.tensor());
}

}  // namespace

int64_t ElementCount(const CopyOp& op) {
  return std::accumulate(op.extent.begin(), op.extent.end(), int64_t{1}, std::multiplies<>());
}

int64_t WireBytes(const CopyOp& op) {
  return ElementCount(op) * layout::ElementBytes(op.target_dtype);
}

int64_t GatherBufferBytes(const GatherBuffer& gathered) {
  return gathered.elements * layout::ElementBytes(gathered.dtype);
}

Result<TransferPlan> BuildPlan(const ModelLayout& source, const ModelLayout& target,
                               const PlanOptions& options) {
  WW_FAIL_IF_ERROR(CheckLayout(source, "source"));
  WW_FAIL_IF_ERROR(CheckLayout(target, "target"));
  return Planner(source, target, options).Build();
}

}  // namespace weightwire::plan
