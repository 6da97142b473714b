// How a plan is made.
//
// 1. Per canonical tensor, the source pieces of all ranks are sorted by box. Equal boxes become one
//    `Owner` with several holders (replicas). Owners are ordered along the dimension with the most
//    distinct cuts, beside the running maximum of their ends, so that the owners that may touch a
//    target box are one short range found by two binary searches.
// 2. Each target box starts as "remaining"; every owner takes its intersection and leaves what is
//    left as at most 2·ndim boxes. So unequal, overlapping source shards are fine and an element is
//    read once. What remains in the end is held by nobody.
// 3. Holders are chosen last, when all copies are known: copies with the fewest holders first,
//    larger before smaller, each to the holder that sends least so far. Two ranks that hold the
//    same boxes therefore never differ by more than one copy.
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
#include "server/plan/plan.h"
#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::ModelLayout;
using layout::Piece;

/// Raise it when equal inputs would give another plan than before.
constexpr std::string_view kPlannerVersion = "weightwire.plan.1";

struct PieceRef {
  uint32_t rank = 0;
  uint32_t tensor = 0;
  uint32_t piece = 0;
};

const layout::LocalTensor& TensorOf(const ModelLayout& layout, const PieceRef& ref) {
  return layout.ranks[ref.rank].tensors[ref.tensor];
}
const Piece& PieceOf(const ModelLayout& layout, const PieceRef& ref) {
  return TensorOf(layout, ref).pieces[ref.piece];
}

/// All pieces of a layout, grouped by canonical tensor; by rank, tensor and piece within a group.
class PiecesByCanonical {
 public:
  explicit PiecesByCanonical(const ModelLayout& layout)
      : first_(layout.canonical.tensors.size() + 1, 0) {
    ForEach(layout, [this](const PieceRef&, uint32_t canonical) { ++first_[canonical + 1]; });
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    refs_.resize(first_.back());
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    ForEach(layout,
            [&](const PieceRef& ref, uint32_t canonical) { refs_[next[canonical]++] = ref; });
  }
  std::span<PieceRef> Of(uint32_t canonical) {
    return std::span(refs_).subspan(first_[canonical], first_[canonical + 1] - first_[canonical]);
  }

 private:
  template <typename Visit>
  static void ForEach(const ModelLayout& layout, Visit visit) {
    for (uint32_t rank = 0; rank < layout.ranks.size(); ++rank) {
      const auto& tensors = layout.ranks[rank].tensors;
      for (uint32_t tensor = 0; tensor < tensors.size(); ++tensor) {
        const auto& pieces = tensors[tensor].pieces;
        for (uint32_t piece = 0; piece < pieces.size(); ++piece) {
          visit(PieceRef{rank, tensor, piece}, pieces[piece].tensor);
        }
      }
    }
  }
  std::vector<size_t> first_;
  std::vector<PieceRef> refs_;
};

/// A source box and the ranks that hold it.
struct Owner {
  const Box* box = nullptr;
  std::span<const PieceRef> holders;  ///< ascending rank
  uint32_t dtypes = 0;                ///< bit per layout::DType among the holders
};

bool BoxLess(const Box& a, const Box& b) {
  if (a.begin != b.begin) return a.begin < b.begin;
  return a.extent < b.extent;
}

std::vector<Owner> GroupReplicas(const ModelLayout& source, std::span<PieceRef> refs) {
  std::stable_sort(refs.begin(), refs.end(), [&](const PieceRef& a, const PieceRef& b) {
    return BoxLess(PieceOf(source, a).box, PieceOf(source, b).box);
  });
  std::vector<Owner> owners;
  size_t first = 0;
  while (first < refs.size()) {
    const Box& box = PieceOf(source, refs[first]).box;
    Owner owner{.box = &box, .holders = {}, .dtypes = 0};
    size_t last = first;
    for (; last < refs.size() && PieceOf(source, refs[last]).box == box; ++last) {
      owner.dtypes |= 1u << static_cast<int>(TensorOf(source, refs[last]).dtype);
    }
    owner.holders = refs.subspan(first, last - first);
    owners.push_back(owner);
    first = last;
  }
  return owners;
}

/// Finds the owners that may share elements with a box.
class OwnerIndex {
 public:
  explicit OwnerIndex(std::vector<Owner> owners) : owners_(std::move(owners)) {
    if (owners_.empty()) return;
    dim_ = MostCutDim();
    if (dim_ < 0) return;
    const auto d = static_cast<size_t>(dim_);
    std::stable_sort(owners_.begin(), owners_.end(), [d](const Owner& a, const Owner& b) {
      return a.box->begin[d] < b.box->begin[d];
    });
    int64_t reach = 0;
    for (const Owner& owner : owners_) {
      reach = std::max(reach, owner.box->begin[d] + owner.box->extent[d]);
      reach_.push_back(reach);
    }
  }

  std::span<const Owner> Candidates(const Box& box) const {
    if (dim_ < 0) return owners_;
    const auto d = static_cast<size_t>(dim_);
    const auto first = std::upper_bound(reach_.begin(), reach_.end(), box.begin[d]);
    const auto last = std::partition_point(owners_.begin(), owners_.end(), [&](const Owner& owner) {
      return owner.box->begin[d] < box.begin[d] + box.extent[d];
    });
    const auto from = static_cast<size_t>(first - reach_.begin());
    const auto to = static_cast<size_t>(last - owners_.begin());
    return from < to ? std::span(owners_).subspan(from, to - from) : std::span<const Owner>();
  }

 private:
  int MostCutDim() const {
    int best = -1;
    size_t best_cuts = 0;
    std::vector<int64_t> cuts;
    for (size_t d = 0; d < owners_[0].box->begin.size(); ++d) {
      cuts.clear();
      for (const Owner& owner : owners_) cuts.push_back(owner.box->begin[d]);
      std::sort(cuts.begin(), cuts.end());
      const auto distinct =
          static_cast<size_t>(std::unique(cuts.begin(), cuts.end()) - cuts.begin());
      if (distinct <= best_cuts) continue;
      best = static_cast<int>(d);
      best_cuts = distinct;
    }
    return best;
  }

  std::vector<Owner> owners_;
  std::vector<int64_t> reach_;  ///< greatest end among owners_[0..i] along dim_
  int dim_ = -1;                ///< -1: scalars, every owner is a candidate
};

/// Appends to `out` what `whole` keeps after losing `part`, which lies inside it.
void AppendRest(const Box& whole, const Box& part, std::vector<Box>& out) {
  Box core = whole;
  for (size_t d = 0; d < whole.begin.size(); ++d) {
    const int64_t before = part.begin[d] - core.begin[d];
    const int64_t after = core.begin[d] + core.extent[d] - part.begin[d] - part.extent[d];
    if (before > 0) {
      out.push_back(core);
      out.back().extent[d] = before;
    }
    if (after > 0) {
      out.push_back(core);
      out.back().begin[d] = part.begin[d] + part.extent[d];
      out.back().extent[d] = after;
    }
    core.begin[d] = part.begin[d];
    core.extent[d] = part.extent[d];
  }
}

/// A copy whose source rank is not chosen yet.
struct Draft {
  uint32_t canonical = 0;
  PieceRef target;
  std::span<const PieceRef> holders;
  size_t box_at = 0;  ///< begins, then extents, in Planner::boxes_
  int64_t target_offset = 0;
  int64_t bytes = 0;
  uint32_t holder = 0;  ///< index into `holders`
};

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
        target_pieces_(target) {}

  Result<TransferPlan> Build() {
    for (uint32_t t = 0; t < target_.canonical.tensors.size(); ++t) {
      WW_FAIL_IF_ERROR(DraftTensor(t));
    }
    ChooseHolders();
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
    const OwnerIndex index(GroupReplicas(source_, source_pieces_.Of(*found)));
    const size_t first = drafts_.size();
    for (const PieceRef& ref : wanted) {
      WW_RETURN_IF_ERROR(DraftPiece(canonical, ref, index));
    }
    std::sort(drafts_.begin() + static_cast<ptrdiff_t>(first), drafts_.end(),
              [](const Draft& a, const Draft& b) {
                return std::tie(a.target.rank, a.target.tensor, a.target_offset) <
                       std::tie(b.target.rank, b.target.tensor, b.target_offset);
              });
    return OkStatus();
  }

  Status DraftPiece(uint32_t canonical, const PieceRef& ref, const OwnerIndex& index) {
    const Piece& piece = PieceOf(target_, ref);
    remaining_.assign(1, piece.box);
    for (const Owner& owner : index.Candidates(piece.box)) {
      next_.clear();
      for (const Box& box : remaining_) {
        if (const std::optional<Box> part = layout::Intersect(box, *owner.box)) {
          WW_RETURN_IF_ERROR(AddDraft(canonical, ref, owner, *part));
          AppendRest(box, *part, next_);
        } else {
          next_.push_back(box);
        }
      }
      remaining_.swap(next_);
      if (remaining_.empty()) return OkStatus();
    }
    return Refuse(Code::kFailedPrecondition, Reason::kUnownedElement,
                  "no source rank holds elements " + BoxText(remaining_[0]))
        .AtRank(RankText(Side::kTarget, ref.rank))
        .AtTensor(target_.canonical.tensors[canonical].name)
        .Remedy("check that all source ranks have registered and cover the tensor");
  }

  Status AddDraft(uint32_t canonical, const PieceRef& ref, const Owner& owner, const Box& box) {
    const layout::DType dtype = TensorOf(target_, ref).dtype;
    WW_RETURN_IF_ERROR(CheckDtypes(canonical, ref, owner));
    if (drafts_.size() >= options_.copies_max) {
      return Refuse(Code::kResourceExhausted, Reason::kLimitExceeded,
                    "the plan needs more than " + std::to_string(options_.copies_max) + " copies");
    }
    Draft draft;
    draft.canonical = canonical;
    draft.target = ref;
    draft.holders = owner.holders;
    draft.box_at = boxes_.size();
    draft.target_offset = OffsetOf(PieceOf(target_, ref), box.begin);
    draft.bytes = layout::ElementCount(box) * layout::ElementBytes(dtype);
    boxes_.insert(boxes_.end(), box.begin.begin(), box.begin.end());
    boxes_.insert(boxes_.end(), box.extent.begin(), box.extent.end());
    drafts_.push_back(draft);
    return OkStatus();
  }

  Status CheckDtypes(uint32_t canonical, const PieceRef& ref, const Owner& owner) const {
    const layout::DType to = TensorOf(target_, ref).dtype;
    if (owner.dtypes == 1u << static_cast<int>(to)) return OkStatus();
    for (const PieceRef& holder : owner.holders) {
      const layout::DType from = TensorOf(source_, holder).dtype;
      if (CastKnown(from, to)) continue;
      return Refuse(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                    RankText(Side::kSource, holder.rank) + " holds " +
                        std::string(layout::DTypeName(from)) + ", " +
                        RankText(Side::kTarget, ref.rank) + " wants " +
                        std::string(layout::DTypeName(to)) + ", and no cast is known")
          .AtRank(RankText(Side::kTarget, ref.rank))
          .AtTensor(target_.canonical.tensors[canonical].name)
          .Remedy("casts are known among BF16, F16 and F32 only");
    }
    return OkStatus();
  }

  void ChooseHolders() {
    std::vector<size_t> order(drafts_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
      const Draft& x = drafts_[a];
      const Draft& y = drafts_[b];
      if (x.holders.size() != y.holders.size()) return x.holders.size() < y.holders.size();
      if (x.bytes != y.bytes) return x.bytes > y.bytes;
      return a < b;
    });
    std::vector<int64_t> sent(source_.ranks.size(), 0);
    for (size_t i : order) {
      Draft& draft = drafts_[i];
      for (uint32_t h = 1; h < draft.holders.size(); ++h) {
        if (sent[draft.holders[h].rank] < sent[draft.holders[draft.holder].rank]) draft.holder = h;
      }
      sent[draft.holders[draft.holder].rank] += draft.bytes;
    }
  }

  static uint64_t StreamKey(const Draft& draft) {
    return uint64_t{draft.target.rank} << 32 | draft.holders[draft.holder].rank;
  }

  Result<TransferPlan> Emit() {
    std::vector<uint64_t> keys;
    keys.reserve(drafts_.size());
    for (const Draft& draft : drafts_) keys.push_back(StreamKey(draft));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    if (keys.size() > options_.streams_max) {
      return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the plan needs " + std::to_string(keys.size()) + " streams, more than " +
                      std::to_string(options_.streams_max));
    }
    TransferPlan plan = Head();
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
    for (const Draft& draft : drafts_) {
      Stream& stream = plan.streams[stream_of.at(StreamKey(draft))];
      stream.bytes += draft.bytes;
      if (__builtin_add_overflow(plan.bytes_total, draft.bytes, &plan.bytes_total)) {
        return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                    "the plan's bytes do not fit 63 bits");
      }
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
    const auto begin = boxes_.begin() + static_cast<ptrdiff_t>(draft.box_at);
    const auto extent = begin + static_cast<ptrdiff_t>(ndim);
    return {{begin, extent}, {extent, extent + static_cast<ptrdiff_t>(ndim)}};
  }

  CopyOp MakeOp(const Draft& draft, const Box& box) const {
    const PieceRef& holder = draft.holders[draft.holder];
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
  std::vector<Draft> drafts_;
  std::vector<int64_t> boxes_;
  std::vector<Box> remaining_;
  std::vector<Box> next_;
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
