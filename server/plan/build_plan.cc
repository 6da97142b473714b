// How a plan is made.
//
// 1. Per canonical tensor, the pieces of all source ranks are cut into disjoint owners, each with
// the
//    ranks that hold it (owners.h).
// 2. Each target box is met with the owners near it. They are disjoint, so an element is read once,
//    and what the common blocks do not add up to is held by nobody.
// 3. Holders are chosen last, when all copies are known (choose_holders.cc).
// 4. Copies are handed out to streams in the global order (canonical tensor, target tensor, target
//    offset); one that continues the stream's last copy on both sides is merged into it.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/plan/casts.h"
#include "server/plan/drafts.h"
#include "server/plan/owners.h"
#include "server/plan/plan.h"
#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;
using layout::Piece;

/// Raise it when equal inputs would give another plan than before.
constexpr std::string_view kPlannerVersion = "weightwire.plan.2";

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
      next.source_offset != last.source_offset + last.extent[*d] * last.source_stride[*d]) {
    return false;
  }
  last.extent[*d] += next.extent[*d];
  last_box.extent = last.extent;
  return true;
}

std::string DtypeRemedy(layout::DType from, layout::DType to) {
  const layout::DType fp8 = layout::DType::kF8E4M3;
  if (from == fp8 || to == fp8) {
    return "weights are neither quantized nor dequantized on the way: both sides hold fp8 weights "
           "with their scales, or neither does; run the engine without quantization_config, or "
           "publish the quantized weights";
  }
  return "casts are known among BF16, F16 and F32 only";
}

Status Refuse(Code code, Reason reason, std::string message) {
  return Status(code, reason, std::move(message));
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
    WW_FAIL_IF_ERROR(CheckCopies(list_.drafts.size()));
    return Emit();
  }

 private:
  Status DraftTensor(uint32_t canonical) {
    const layout::TensorSpec& spec = target_.canonical.tensors[canonical];
    const std::optional<uint32_t> found = source_.canonical.Find(spec.name);
    const std::span<PieceRef> wanted = target_pieces_.Of(canonical);
    if (found && source_.canonical.tensors[*found].shape != spec.shape) {
      return Refuse(Code::kFailedPrecondition, Reason::kShapeMismatch,
                    "source has shape " + ShapeText(source_.canonical.tensors[*found].shape) +
                        ", target " + ShapeText(spec.shape))
          .AtTensor(spec.name)
          .Remedy("both sides must describe the same model: compare their config.json");
    }
    if (wanted.empty()) return OkStatus();
    if (!found) {
      return Refuse(Code::kFailedPrecondition, Reason::kTensorMissing,
                    "the source has no such tensor")
          .AtRank(RankText(Side::kTarget, wanted[0].rank))
          .AtTensor(spec.name)
          .Remedy("both sides must describe the same model: compare their config.json");
    }
    const OwnerIndex index(book_.Cut(source_pieces_.Of(*found)));
    std::vector<Draft>& drafts = list_.drafts;
    const auto first = static_cast<ptrdiff_t>(drafts.size());
    for (const PieceRef& ref : wanted) {
      WW_RETURN_IF_ERROR(DraftPiece(canonical, ref, index));
    }
    std::sort(drafts.begin() + first, drafts.end(), InGlobalOrder);
    return OkStatus();
  }

  Status DraftPiece(uint32_t canonical, const PieceRef& ref, const OwnerIndex& index) {
    const Piece& piece = PieceOf(target_, ref);
    int64_t missing = layout::ElementCount(piece.box);
    for (const Owner& owner : index.Candidates(piece.box)) {
      const std::optional<Box> part = layout::Intersect(piece.box, owner.box);
      if (!part) continue;
      WW_RETURN_IF_ERROR(AddDraft(canonical, ref, owner, *part));
      missing -= layout::ElementCount(*part);
      if (missing == 0) return OkStatus();
    }
    return Refuse(Code::kFailedPrecondition, Reason::kUnownedElement,
                  "no source rank holds elements " + BoxText(FirstMissing(piece.box, index)))
        .AtRank(RankText(Side::kTarget, ref.rank))
        .AtTensor(target_.canonical.tensors[canonical].name)
        .Remedy("check that all source ranks have registered and cover the tensor");
  }

  /// A block of `box`, which the owners do not cover.
  static Box FirstMissing(const Box& box, const OwnerIndex& index) {
    std::vector<Box> remaining = {box};
    for (const Owner& owner : index.Candidates(box)) {
      std::vector<Box> next;
      for (const Box& left : remaining) {
        if (const std::optional<Box> part = layout::Intersect(left, owner.box)) {
          AppendRest(left, *part, next);
        } else {
          next.push_back(left);
        }
      }
      remaining = std::move(next);
    }
    return remaining.at(0);
  }

  Status CheckCopies(size_t copies) const {
    if (copies <= options_.copies_max) return OkStatus();
    return Refuse(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan needs more than " + std::to_string(options_.copies_max) + " copies");
  }

  Status AddDraft(uint32_t canonical, const PieceRef& ref, const Owner& owner, const Box& box) {
    const layout::DType dtype = TensorOf(target_, ref).dtype;
    WW_RETURN_IF_ERROR(CheckDtypes(canonical, ref, owner));
    WW_RETURN_IF_ERROR(CheckCopies(list_.drafts.size() + 1));
    Draft draft;
    draft.canonical = canonical;
    draft.target = ref;
    draft.set = owner.set;
    draft.holders_at = owner.holders_at;
    draft.box_at = list_.boxes.size();
    draft.target_offset = OffsetOf(PieceOf(target_, ref), box.begin);
    draft.bytes = layout::ElementCount(box) * layout::ElementBytes(dtype);
    if (__builtin_add_overflow(bytes_total_, draft.bytes, &bytes_total_)) {
      return Refuse(Code::kResourceExhausted, Reason::kLimitExceeded,
                    "the plan's bytes do not fit 63 bits");
    }
    list_.boxes.insert(list_.boxes.end(), box.begin.begin(), box.begin.end());
    list_.boxes.insert(list_.boxes.end(), box.extent.begin(), box.extent.end());
    list_.drafts.push_back(draft);
    return OkStatus();
  }

  Status CheckDtypes(uint32_t canonical, const PieceRef& ref, const Owner& owner) const {
    const layout::DType to = TensorOf(target_, ref).dtype;
    if (owner.dtypes == 1u << static_cast<int>(to)) return OkStatus();
    for (const PieceRef& holder : book_.HoldersOf(owner.holders_at, owner.set)) {
      const layout::DType from = TensorOf(source_, holder).dtype;
      if (CastKnown(from, to)) continue;
      return Refuse(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                    RankText(Side::kSource, holder.rank) + " holds " +
                        std::string(layout::DTypeName(from)) + ", " +
                        RankText(Side::kTarget, ref.rank) + " wants " +
                        std::string(layout::DTypeName(to)) + ", and no cast is known")
          .AtRank(RankText(Side::kTarget, ref.rank))
          .AtTensor(target_.canonical.tensors[canonical].name)
          .Remedy(DtypeRemedy(from, to));
    }
    return OkStatus();
  }

  const PieceRef& HolderOf(const Draft& draft) const {
    return book_.HoldersOf(draft.holders_at, draft.set)[draft.holder];
  }

  uint64_t StreamKey(const Draft& draft) const {
    return uint64_t{draft.target.rank} << 32 | HolderOf(draft).rank;
  }

  Result<TransferPlan> Emit() {
    std::vector<uint64_t> keys;
    keys.reserve(list_.drafts.size());
    for (const Draft& draft : list_.drafts) keys.push_back(StreamKey(draft));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    if (keys.size() > options_.streams_max) {
      return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan needs " + std::to_string(keys.size()) + " streams, more than " +
                      std::to_string(options_.streams_max));
    }
    TransferPlan plan = Head();
    plan.bytes_total = bytes_total_;
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
    for (const Draft& draft : list_.drafts) {
      Stream& stream = plan.streams[stream_of.at(StreamKey(draft))];
      stream.bytes += draft.bytes;
      Box box = BoxOf(draft);
      CopyOp op = MakeOp(draft, box);
      Box& last_box = last_boxes[stream.id];
      if (!stream.ops.empty() && Merge(stream.ops.back(), last_box, op, box)) continue;
      stream.ops.push_back(std::move(op));
      last_box = std::move(box);
      ++plan.copies_total;
    }
    return plan;
  }

  Box BoxOf(const Draft& draft) const {
    const size_t ndim = PieceOf(target_, draft.target).box.begin.size();
    const auto begin = list_.boxes.begin() + static_cast<ptrdiff_t>(draft.box_at);
    const auto extent = begin + static_cast<ptrdiff_t>(ndim);
    return {{begin, extent}, {extent, extent + static_cast<ptrdiff_t>(ndim)}};
  }

  CopyOp MakeOp(const Draft& draft, const Box& box) const {
    const PieceRef& holder = HolderOf(draft);
    const Piece& from = PieceOf(source_, holder);
    const Piece& to = PieceOf(target_, draft.target);
    CopyOp op;
    op.canonical = draft.canonical;
    op.source_tensor = holder.tensor;
    op.target_tensor = draft.target.tensor;
    op.source_dtype = TensorOf(source_, holder).dtype;
    op.target_dtype = TensorOf(target_, draft.target).dtype;
    op.extent = box.extent;
    op.source_offset = OffsetOf(from, box.begin);
    op.source_stride = from.local_stride;
    op.target_offset = draft.target_offset;
    op.target_stride = to.local_stride;
    return op;
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
  OwnerBook book_;
  DraftList list_;
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

Result<TransferPlan> BuildPlan(const ModelLayout& source, const ModelLayout& target,
                               const PlanOptions& options) {
  WW_FAIL_IF_ERROR(CheckLayout(source, "source"));
  WW_FAIL_IF_ERROR(CheckLayout(target, "target"));
  return Planner(source, target, options).Build();
}

}  // namespace weightwire::plan
