// The planner's owners (plan/owners.h) are the parts; each piece of each rank meets those that it
// covers. A part's holders are all pieces that cover it, a second copy on the same rank included.
#include "server/content/hash_plan.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/plan/owners.h"

namespace weightwire::content {
namespace {

using kernels::KeyedSum;
using layout::Box;

layout::Shape StridesOf(const layout::Shape& shape) {
  layout::Shape strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

int64_t Dot(std::span<const int64_t> a, std::span<const int64_t> b) {
  int64_t sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

bool IsFloat(layout::DType dtype) {
  return dtype == layout::DType::kBF16 || dtype == layout::DType::kF16 ||
         dtype == layout::DType::kF32;
}

class Reader {
 public:
  Reader(const layout::ModelLayout& layout, HashPlan& hash_plan)
      : layout_(layout), hash_plan_(hash_plan), pieces_(layout), book_(layout) {}

  Status Read() {
    hash_plan_.ranks.resize(layout_.ranks.size());
    hash_plan_.tensors = layout_.canonical.tensors;
    hash_plan_.whole.resize(hash_plan_.tensors.size());
    for (uint32_t t = 0; t < hash_plan_.tensors.size(); ++t) WW_RETURN_IF_ERROR(ReadTensor(t));
    return OkStatus();
  }

 private:
  Status ReadTensor(uint32_t tensor) {
    const std::span<plan::PieceRef> cut = pieces_.Of(tensor);
    if (cut.empty()) return OkStatus();
    const std::vector<plan::PieceRef> refs(cut.begin(), cut.end());  // Cut changes their order
    layout::TensorSpec& spec = hash_plan_.tensors[tensor];
    spec.dtype = plan::TensorOf(layout_, refs.front()).dtype;
    std::vector<plan::Owner> owners = book_.Cut(cut);
    int64_t held = 0;
    for (plan::Owner& owner : owners) {
      held += layout::ElementCount(owner.box);
      owner.set =
          static_cast<uint32_t>(hash_plan_.parts.size());  // who they are, we ask the pieces
      hash_plan_.parts.push_back({tensor, 0});
    }
    int64_t elements = 1;
    for (int64_t extent : spec.shape) elements *= extent;
    hash_plan_.whole[tensor] = held == elements;
    const plan::OwnerIndex index(std::move(owners));
    const layout::Shape strides = StridesOf(spec.shape);
    for (const plan::PieceRef& ref : refs) {
      WW_RETURN_IF_ERROR(ReadPiece(tensor, ref, index, strides));
    }
    return OkStatus();
  }

  Status ReadPiece(uint32_t tensor, const plan::PieceRef& ref, const plan::OwnerIndex& index,
                   const layout::Shape& strides) {
    const layout::DType wire = hash_plan_.tensors[tensor].dtype;
    const layout::LocalTensor& local = plan::TensorOf(layout_, ref);
    if (local.dtype != wire && !(IsFloat(local.dtype) && IsFloat(wire))) {
      return Status(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                    "held as " + std::string(layout::DTypeName(local.dtype)) +
                        ", and by another rank as " + std::string(layout::DTypeName(wire)))
          .AtRank("rank " + std::to_string(ref.rank))
          .AtTensor(local.name);
    }
    const layout::Piece& piece = plan::PieceOf(layout_, ref);
    for (const plan::Owner& owner : index.Candidates(piece.box)) {
      const std::optional<Box> common = layout::Intersect(piece.box, owner.box);
      if (!common || *common != owner.box) continue;
      plan::CopyOp op;
      op.canonical = op.target_tensor = tensor;
      op.source_tensor = ref.tensor;
      op.source_dtype = local.dtype;
      op.target_dtype = wire;
      op.extent = common->extent;
      op.source_offset = piece.local_offset + Dot(common->begin, piece.local_stride) -
                         Dot(piece.box.begin, piece.local_stride);
      op.source_stride = piece.local_stride;
      op.target_offset = Dot(common->begin, strides);
      op.target_stride = strides;
      ++hash_plan_.parts[owner.set].holders;
      hash_plan_.ranks[ref.rank].parts.push_back(owner.set);
      hash_plan_.ranks[ref.rank].ops.push_back(std::move(op));
    }
    return OkStatus();
  }

  const layout::ModelLayout& layout_;
  HashPlan& hash_plan_;
  plan::PiecesByCanonical pieces_;
  plan::OwnerTable book_;
};

/// One holder's sum of a part.
struct Vote {
  uint32_t rank = 0;
  uint32_t local_tensor = 0;
  KeyedSum sum;
};

/// What most holders have; of equally many, the first one's.
KeyedSum Winner(std::span<const Vote> votes) {
  KeyedSum best;
  std::ptrdiff_t most = 0;
  for (const Vote& vote : votes) {
    const auto same = std::ranges::count(votes, vote.sum, &Vote::sum);
    if (same > most) best = vote.sum;
    most = std::max(most, same);
  }
  return best;
}

void Compare(uint32_t part, uint32_t tensor, std::span<const Vote> votes, Content& content) {
  const bool agree =
      std::ranges::all_of(votes, [&](const Vote& vote) { return vote.sum == votes[0].sum; });
  content.parts[part] = agree ? votes[0].sum : Winner(votes);
  if (agree) return;
  const KeyedSum& won = content.parts[part];
  const auto winner = std::ranges::find(votes, won, &Vote::sum);
  const auto behind = std::ranges::count(votes, won, &Vote::sum);
  for (const Vote& vote : votes) {
    if (vote.sum == won) continue;
    content.disagreements.push_back({tensor, part, vote.rank, vote.local_tensor, winner->rank,
                                     std::ranges::count(votes, vote.sum, &Vote::sum) < behind});
  }
}

}  // namespace

Result<HashPlan> HashPlanOf(const layout::ModelLayout& layout,
                            const layout::Fingerprint& fingerprint) {
  HashPlan hash_plan;
  const kernels::SumSeed id =
      SeedOf("reading of " + fingerprint.ToHex());  // never that of a plan between two layouts
  hash_plan.id = {id.lane[0], id.lane[1]};
  WW_FAIL_IF_ERROR(Reader(layout, hash_plan).Read());
  return hash_plan;
}

plan::RankSlice SliceOf(const HashPlan& hash_plan, uint32_t rank) {
  plan::RankSlice slice;
  slice.plan = hash_plan.id;
  slice.side = plan::Side::kSource;
  slice.rank = rank;
  plan::Stream stream{0, rank, 0, 0, hash_plan.ranks[rank].ops};
  for (const plan::CopyOp& op : stream.ops) stream.bytes += plan::WireBytes(op);
  if (!stream.ops.empty()) slice.streams.push_back(std::move(stream));
  plan::TakeNames(
      slice, [&](uint32_t tensor) -> const std::string& { return hash_plan.tensors[tensor].name; });
  return slice;
}

Content Combine(const HashPlan& hash_plan, std::span<const std::vector<KeyedSum>> sums) {
  std::vector<size_t> first(hash_plan.parts.size() + 1, 0);
  for (size_t part = 0; part < hash_plan.parts.size(); ++part) {
    first[part + 1] = first[part] + hash_plan.parts[part].holders;
  }
  std::vector<Vote> votes(first.back());
  std::vector<size_t> next(first.begin(), first.end() - 1);
  for (uint32_t rank = 0; rank < hash_plan.ranks.size(); ++rank) {
    const HashPlan::RankOps& held = hash_plan.ranks[rank];
    for (size_t op = 0; op < held.ops.size(); ++op) {
      votes[next[held.parts[op]]++] = {rank, held.ops[op].source_tensor, sums[rank][op]};
    }
  }
  Content content;
  content.parts.resize(hash_plan.parts.size());
  std::vector<KeyedSum> tensors(hash_plan.tensors.size());
  for (uint32_t part = 0; part < hash_plan.parts.size(); ++part) {
    const uint32_t tensor = hash_plan.parts[part].tensor;
    Compare(part, tensor, std::span(votes).subspan(first[part], hash_plan.parts[part].holders),
            content);
    tensors[tensor] += content.parts[part];
  }
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    if (hash_plan.whole[tensor])
      content.leaves.push_back({hash_plan.tensors[tensor], tensors[tensor]});
  }
  return content;
}

std::vector<uint32_t> HoldersOf(const HashPlan& hash_plan, uint32_t tensor) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < hash_plan.ranks.size(); ++rank) {
    const auto& ops = hash_plan.ranks[rank].ops;
    const auto holds = [&](const plan::CopyOp& op) { return op.canonical == tensor; };
    if (std::ranges::any_of(ops, holds)) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace weightwire::content
