// The proof, rank by rank of the target:
//
// 1. Storage: in each target tensor, no piece stores two canonical elements in one place and no two
//    pieces share a place. Pieces are swept by their span in storage; for two whose spans meet, the
//    question "do Σ i·s and Σ j·t + Δ ever agree" is answered exactly by BoundedSum.
// 2. Every copy is cut at piece borders on the target side. That shows which canonical block it
//    writes, that all of it lies inside pieces, and that offsets and strides agree with them. The
//    same cut on the source side shows that the same canonical block is read, inside pieces.
// 3. Coverage: the blocks written into one piece are pairwise disjoint (swept along the dimension
//    with most distinct cuts) and their elements add up to the piece's. Being inside the piece and
//    disjoint, equal counts mean that each element is written exactly once.
// 4. Codes and scales: a copy of codes writes whole blocks of the canonical tensor, so the grid of
//    blocks from its first element on is the tensor's; scales are read from exactly the elements
//    that share them. A weight is quantized as a whole or not at all.
// 5. What a rank gathers is a tensor like its others: its pieces are what the rank makes codes of,
//    so that 1 to 3 show that each of their elements is written once, and where. Codes and scales
//    that it makes are copies which read there, with 2 to 4 for them.
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
#include "server/plan/disjoint.h"
#include "server/plan/locator.h"
#include "server/plan/plan.h"
#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

using layout::Box;
using layout::DType;
using layout::LocalTensor;
using layout::ModelLayout;
using layout::Piece;

Status Wrong(std::string message) {
  return Status(Code::kInternal, Reason::kInternal, "plan is wrong: " + std::move(message))
      .Remedy("report this as a defect of the planner; nothing was transferred");
}

class Proof {
 public:
  Proof(const TransferPlan& plan, const ModelLayout& source, const ModelLayout& target)
      : plan_(plan),
        source_(source),
        target_(target),
        ways_(target.canonical.tensors.size(), 0),
        source_locators_(source.ranks.size()) {
    std::unordered_map<std::string_view, uint32_t> index;
    for (uint32_t t = 0; t < source.canonical.tensors.size(); ++t) {
      index.emplace(source.canonical.tensors[t].name, t);
    }
    const auto find = [&index](std::string_view name) {
      const auto found = index.find(name);
      return found == index.end() ? std::nullopt : std::optional(found->second);
    };
    for (const auto& spec : target.canonical.tensors) {
      source_canonical_.push_back(find(spec.name));
      source_floats_.push_back(find(layout::UnpackedName(spec.name)));
    }
  }

  Status Run() {
    WW_RETURN_IF_ERROR(CheckHead());
    size_t next = 0;
    for (uint32_t rank = 0; rank < target_.ranks.size(); ++rank) {
      WW_RETURN_IF_ERROR(BeginRank(rank));
      for (; next < plan_.streams.size() && plan_.streams[next].target_rank == rank; ++next) {
        WW_RETURN_IF_ERROR(CheckStream(plan_.streams[next]));
      }
      WW_RETURN_IF_ERROR(CheckCoverage(rank));
    }
    return OkStatus();
  }

 private:
  Status CheckHead() const {
    if (plan_.source != layout::FingerprintOf(source_) ||
        plan_.target != layout::FingerprintOf(target_) ||
        plan_.source_ranks != source_.ranks.size() || plan_.target_ranks != target_.ranks.size()) {
      return Wrong("it was made for other layouts");
    }
    if (plan_.tensor_names.size() != target_.canonical.tensors.size()) {
      return Wrong("tensor names are not the target's");
    }
    for (size_t t = 0; t < plan_.tensor_names.size(); ++t) {
      if (plan_.tensor_names[t] != target_.canonical.tensors[t].name) {
        return Wrong("tensor name " + std::to_string(t) + " is not the target's");
      }
    }
    return CheckStreamOrder();
  }

  Status CheckStreamOrder() const {
    int64_t bytes = 0;
    uint64_t copies = 0;
    for (size_t i = 0; i < plan_.streams.size(); ++i) {
      const Stream& stream = plan_.streams[i];
      const std::string where = "stream " + std::to_string(i);
      if (stream.id != i) return Wrong(where + " has id " + std::to_string(stream.id));
      if (stream.ops.empty()) return Wrong(where + " is empty");
      if (stream.source_rank >= source_.ranks.size() ||
          stream.target_rank >= target_.ranks.size()) {
        return Wrong(where + " names a rank that does not exist");
      }
      if (i > 0 && std::pair(plan_.streams[i - 1].target_rank, plan_.streams[i - 1].source_rank) >=
                       std::pair(stream.target_rank, stream.source_rank)) {
        return Wrong(where + " is out of order");
      }
      bytes += stream.bytes;
      copies += stream.ops.size();
    }
    if (bytes != plan_.bytes_total) return Wrong("total bytes are not the streams' sum");
    if (copies != plan_.copies_total) return Wrong("total copies are not the streams' sum");
    for (const auto& [rank, gathered] : plan_.gathered) {
      const bool floats = gathered.dtype == DType::kBF16 || gathered.dtype == DType::kF16 ||
                          gathered.dtype == DType::kF32;
      if (rank >= target_.ranks.size() || gathered.elements < 1 || gathered.made.empty() ||
          !floats) {
        return Wrong("what " + RankText(Side::kTarget, rank) + " gathers is malformed");
      }
    }
    return OkStatus();
  }

  Status BeginRank(uint32_t rank) {
    written_.clear();
    targets_.clear();
    target_locators_.clear();
    for (const LocalTensor& tensor : target_.ranks[rank].tensors) {
      WW_RETURN_IF_ERROR(AddTarget(rank, tensor));
    }
    const auto gathered = plan_.gathered.find(rank);
    return gathered == plan_.gathered.end() ? OkStatus() : BeginGathered(rank, gathered->second);
  }

  Status AddTarget(uint32_t rank, const LocalTensor& tensor) {
    targets_.push_back(&tensor);
    target_locators_.emplace_back(tensor);
    if (auto defect = StorageDefect(tensor, target_locators_.back())) {
      return Wrong("target tensor '" + tensor.name + "': " + *defect)
          .AtRank(RankText(Side::kTarget, rank))
          .AtTensor(tensor.name);
    }
    return OkStatus();
  }

  /// The memory that the rank gathers in, as a tensor; then the copies that read it.
  Status BeginGathered(uint32_t rank, const GatherBuffer& gathered) {
    const size_t tensors = targets_.size();
    gather_tensor_ = {"what is gathered", gathered.dtype, {gathered.elements}, {}};
    for (size_t i = 0; i < gathered.made.size(); ++i) {
      const CopyOp& op = gathered.made[i];
      auto defect = FormDefect(op, gather_tensor_, tensors);
      if (!defect && op.source_tensor != tensors) defect = "reads what is not gathered";
      if (!defect && op.transform == Transform::kElements) defect = "makes nothing";
      if (defect) return WrongMade(rank, i, *defect);
      if (op.transform != Transform::kCodes) continue;
      const auto box = TargetBox(target_locators_[op.target_tensor], op);
      if (!box) return WrongMade(rank, i, "starts where the target stores nothing of the tensor");
      const auto read = ReadBox(op, *box);
      if (!read) return WrongMade(rank, i, "quantizes parts of blocks at " + BoxText(*box));
      gather_tensor_.pieces.push_back({op.canonical, *read, op.source_offset, op.source_stride});
    }
    // Two tensors of the rank may hold the same codes.
    auto& pieces = gather_tensor_.pieces;
    std::ranges::stable_sort(pieces, {}, &Piece::local_offset);
    pieces.erase(std::unique(pieces.begin(), pieces.end()), pieces.end());
    WW_RETURN_IF_ERROR(AddTarget(rank, gather_tensor_));
    for (size_t i = 0; i < gathered.made.size(); ++i) {
      const CopyOp& op = gathered.made[i];
      const auto defect = BlockDefect(op, target_locators_.back(), *WeightOf(op));
      if (defect) return WrongMade(rank, i, *defect);
    }
    return OkStatus();
  }

  Status WrongMade(uint32_t rank, size_t index, const std::string& defect) const {
    const uint32_t canonical = plan_.gathered.at(rank).made[index].canonical;
    const std::string name =
        canonical < plan_.tensor_names.size() ? plan_.tensor_names[canonical] : "?";
    return Wrong("copy " + std::to_string(index) + " of what " + RankText(Side::kTarget, rank) +
                 " gathers of '" + name + "' " + defect)
        .AtRank(RankText(Side::kTarget, rank))
        .AtTensor(name);
  }

  Status CheckStream(const Stream& stream) {
    int64_t bytes = 0;
    const CopyOp* last = nullptr;
    for (size_t i = 0; i < stream.ops.size(); ++i) {
      const CopyOp& op = stream.ops[i];
      if (auto defect = OpDefect(stream, op)) return WrongOp(stream, i, *defect);
      if (last && std::tie(last->canonical, last->target_tensor, last->target_offset) >=
                      std::tie(op.canonical, op.target_tensor, op.target_offset)) {
        return WrongOp(stream, i, "is out of the global order");
      }
      bytes += WireBytes(op);
      last = &op;
    }
    if (bytes != stream.bytes) {
      return Wrong("stream " + std::to_string(stream.id) + " claims " +
                   std::to_string(stream.bytes) + " bytes, its copies move " +
                   std::to_string(bytes));
    }
    return OkStatus();
  }

  Status WrongOp(const Stream& stream, size_t index, const std::string& defect) const {
    const uint32_t canonical = stream.ops[index].canonical;
    const std::string name =
        canonical < plan_.tensor_names.size() ? plan_.tensor_names[canonical] : "?";
    return Wrong("stream " + std::to_string(stream.id) + " (" +
                 RankText(Side::kSource, stream.source_rank) + " to " +
                 RankText(Side::kTarget, stream.target_rank) + ") op " + std::to_string(index) +
                 " of '" + name + "' " + defect)
        .AtRank(RankText(Side::kTarget, stream.target_rank))
        .AtTensor(name);
  }

  /// What is wrong with one copy; nullopt when it writes what it reads. Records what it writes.
  std::optional<std::string> OpDefect(const Stream& stream, const CopyOp& op) {
    const auto& sources = source_.ranks[stream.source_rank].tensors;
    if (op.source_tensor >= sources.size()) return "names a local tensor that does not exist";
    if (auto defect = FormDefect(op, sources[op.source_tensor], targets_.size())) return defect;
    const bool gathers = targets_[op.target_tensor] == &gather_tensor_;
    const auto read = gathers || op.transform != Transform::kElements
                          ? source_floats_[*WeightOf(op)]
                          : source_canonical_[op.canonical];
    if (!read) return "names a tensor the source does not have";
    return BlockDefect(op, SourceLocator(stream.source_rank, op.source_tensor), *read);
  }

  /// What is wrong with a copy from `from` to one of the rank's first `targets` tensors, without
  /// asking which elements they are.
  std::optional<std::string> FormDefect(const CopyOp& op, const LocalTensor& from, size_t targets) {
    if (op.canonical >= target_.canonical.tensors.size()) return "names an unknown tensor";
    if (op.target_tensor >= targets) return "names a local tensor that does not exist";
    const LocalTensor& to = *targets_[op.target_tensor];
    if (op.source_dtype != from.dtype || op.target_dtype != to.dtype) {
      return "has a dtype that its tensor has not";
    }
    const size_t ndim = target_.canonical.tensors[op.canonical].shape.size();
    if (op.extent.size() != ndim || op.source_stride.size() != ndim ||
        op.target_stride.size() != ndim) {
      return "has not one extent and stride per dimension";
    }
    if (auto defect = ConversionDefect(op, WeightOf(op), &to == &gather_tensor_)) return defect;
    const auto& source_extent = op.source_extent.empty() ? op.extent : op.source_extent;
    if (!InsideStorage(from, source_extent, op.source_offset, op.source_stride)) {
      return "reads outside its source tensor";
    }
    if (!InsideStorage(to, op.extent, op.target_offset, op.target_stride)) {
      return "writes outside its target tensor";
    }
    return std::nullopt;
  }

  /// The weight whose codes or scales the copy's tensor holds, if it has blocks.
  std::optional<uint32_t> WeightOf(const CopyOp& op) const {
    if (!target_.canonical.tensors[op.canonical].block.empty()) return op.canonical;
    return target_.canonical.WeightOf(op.canonical);
  }

  std::optional<std::string> ConversionDefect(const CopyOp& op, std::optional<uint32_t> weight,
                                              bool gathers) {
    const bool quantizes = op.transform != Transform::kElements;
    if (gathers && (quantizes || weight != op.canonical)) return "gathers what is no weight";
    if (gathers && op.source_dtype != op.target_dtype && op.target_dtype != DType::kF32) {
      return "rounds what it gathers";
    }
    if (weight) {
      uint8_t& ways = ways_[*weight];
      ways = static_cast<uint8_t>(ways | (quantizes || gathers ? 2 : 1));
      if (ways == 3) return "copies what is quantized elsewhere";
    }
    if (!quantizes) {
      if (!op.block.empty() || !op.source_extent.empty()) return "has blocks and quantizes nothing";
      if (CastKnown(op.source_dtype, op.target_dtype)) return std::nullopt;
      return "needs a cast that is not known";
    }
    const bool scales = op.transform == Transform::kScales;
    if (!weight || scales == (*weight == op.canonical)) return "quantizes what is no such tensor";
    const layout::TensorSpec& spec = target_.canonical.tensors[*weight];
    const std::vector<int64_t> in_elements = {spec.block[0], spec.block[1] * spec.packed};
    if (op.block != (scales ? in_elements : spec.block)) return "has blocks of another size";
    if (op.rule != spec.scale_rule) return "has scales by another rule";
    if (op.source_extent.size() != (scales || spec.packed > 1 ? 2 : 0)) return "reads no matrix";
    const DType from = op.source_dtype;
    const DType to = op.target_dtype;
    if ((from != DType::kBF16 && from != DType::kF16 && from != DType::kF32) ||
        !(scales ? HoldsScales(op.rule, from, to) : to == spec.dtype)) {
      return "quantizes dtypes that it cannot";
    }
    return std::nullopt;
  }

  static bool HoldsScales(layout::ScaleRule rule, DType from, DType to) {
    using Rule = layout::ScaleRule;
    if (to == DType::kU8 || to == DType::kF8E8M0) {
      return rule == Rule::kPowerOfTwo || rule == Rule::kPowerOfTwoRounded ||
             rule == Rule::kMxFp4 || rule == Rule::kMxFp4Rounded;
    }
    if (rule == Rule::kOwnKind || rule == Rule::kInt4) return to == from;
    return to == DType::kF32 &&
           (rule == Rule::kQuotient || rule == Rule::kOwnQuotient || rule == Rule::kPowerOfTwo);
  }

  /// The canonical elements that a copy into `box` must read; nullopt when they are no whole
  /// blocks.
  std::optional<Box> ReadBox(const CopyOp& op, const Box& box) const {
    if (op.transform == Transform::kElements) return box;
    const layout::TensorSpec& weight = target_.canonical.tensors[*WeightOf(op)];
    Box read = box;
    for (size_t d = 0; d < 2; ++d) {
      const int64_t packed = d == 1 ? weight.packed : 1;
      if (op.transform == Transform::kScales) {
        const int64_t size = weight.block[d] * packed;
        read.begin[d] *= size;
        read.extent[d] = std::min(read.extent[d] * size, weight.shape[d] * packed - read.begin[d]);
        if (read.extent[d] != op.source_extent[d]) return std::nullopt;
        continue;
      }
      const int64_t size = weight.block[d];
      const int64_t end = box.begin[d] + box.extent[d];
      if (box.begin[d] % size != 0 || (end % size != 0 && end != weight.shape[d])) {
        return std::nullopt;
      }
      read.begin[d] *= packed;
      read.extent[d] *= packed;
      if (weight.packed > 1 && read.extent[d] != op.source_extent[d]) return std::nullopt;
    }
    return read;
  }

  /// What is wrong with the elements of a copy; nullopt when it writes what it reads. Records what
  /// it writes.
  std::optional<std::string> BlockDefect(const CopyOp& op, const PieceLocator& source,
                                         uint32_t source_canonical) {
    const PieceLocator& target = target_locators_[op.target_tensor];
    const std::optional<Box> box = TargetBox(target, op);
    if (!box) return "starts where the target stores nothing of the tensor";
    auto parts = target.Split(op.canonical, *box, op.target_offset, op.target_stride);
    if (!parts) return "does not write " + BoxText(*box) + " where the target stores it";
    const std::optional<Box> read = ReadBox(op, *box);
    if (!read) return "quantizes parts of blocks at " + BoxText(*box);
    if (!source.Split(source_canonical, *read, op.source_offset, op.source_stride)) {
      return "does not read " + BoxText(*read) + " where the source stores it";
    }
    for (PiecePart& part : *parts) written_.push_back({op.target_tensor, std::move(part)});
    return std::nullopt;
  }

  static bool InsideStorage(const LocalTensor& tensor, std::span<const int64_t> extent,
                            int64_t offset, std::span<const int64_t> stride) {
    int64_t elements = 1;
    for (int64_t size : tensor.shape) elements *= size;
    int64_t last = offset;
    for (size_t d = 0; d < extent.size(); ++d) {
      int64_t reach;
      if (extent[d] < 1 || stride[d] < 1 ||
          __builtin_mul_overflow(extent[d] - 1, stride[d], &reach) ||
          __builtin_add_overflow(last, reach, &last)) {
        return false;
      }
    }
    return offset >= 0 && last < elements;
  }

  const PieceLocator& SourceLocator(uint32_t rank, uint32_t tensor) {
    auto& locators = source_locators_[rank];
    if (locators.empty()) {
      for (const LocalTensor& local : source_.ranks[rank].tensors) locators.emplace_back(local);
    }
    return locators[tensor];
  }

  Status CheckCoverage(uint32_t rank) {
    std::sort(written_.begin(), written_.end(), [](const Written& a, const Written& b) {
      return std::tie(a.tensor, a.part.piece) < std::tie(b.tensor, b.part.piece);
    });
    size_t next = 0;
    for (uint32_t t = 0; t < targets_.size(); ++t) {
      for (uint32_t p = 0; p < targets_[t]->pieces.size(); ++p) {
        const size_t first = next;
        while (next < written_.size() && written_[next].tensor == t &&
               written_[next].part.piece == p) {
          ++next;
        }
        WW_RETURN_IF_ERROR(
            CheckPiece(rank, *targets_[t], p, std::span(written_).subspan(first, next - first)));
      }
    }
    return OkStatus();
  }

  Status CheckPiece(uint32_t rank, const LocalTensor& tensor, uint32_t index,
                    std::span<Written> blocks) const {
    const Piece& piece = tensor.pieces[index];
    const std::string& name = target_.canonical.tensors[piece.tensor].name;
    if (const auto overlap = FindOverlap(blocks)) {
      return Wrong("in '" + tensor.name + "', elements of " + name + " are written twice: " +
                   BoxText(overlap->first) + " and " + BoxText(overlap->second))
          .AtRank(RankText(Side::kTarget, rank))
          .AtTensor(name);
    }
    int64_t missing = Elements(piece.box);
    for (const Written& block : blocks) missing -= Elements(block.part.box);
    if (missing == 0) return OkStatus();
    return Wrong("in '" + tensor.name + "', " + std::to_string(missing) + " elements of " + name +
                 " " + BoxText(piece.box) + " are never written")
        .AtRank(RankText(Side::kTarget, rank))
        .AtTensor(name);
  }

  static int64_t Elements(const Box& box) {
    return std::accumulate(box.extent.begin(), box.extent.end(), int64_t{1}, std::multiplies<>());
  }

  const TransferPlan& plan_;
  const ModelLayout& source_;
  const ModelLayout& target_;
  std::vector<std::optional<uint32_t>> source_canonical_;  ///< by target canonical tensor
  std::vector<std::optional<uint32_t>> source_floats_;  ///< of a packed weight, what it is made of
  std::vector<uint8_t> ways_;  ///< by target canonical weight with blocks: 1 copied, 2 quantized
  std::vector<std::vector<PieceLocator>> source_locators_;  ///< by rank and tensor; made when used
  std::vector<const LocalTensor*> targets_;    ///< of the rank at hand; last, what it gathers
  std::vector<PieceLocator> target_locators_;  ///< of `targets_`
  LocalTensor gather_tensor_;
  std::vector<Written> written_;  ///< into the rank at hand
};

}  // namespace

Status VerifyPlan(const TransferPlan& plan, const ModelLayout& source, const ModelLayout& target) {
  return Proof(plan, source, target).Run();
}

}  // namespace weightwire::plan
