#include <algorithm>
#include <unordered_set>

#include "server/base/checked.h"
#include "server/layout/blocks.h"
#include "server/layout/overlap.h"
#include "server/layout/types.h"

namespace weightwire::layout {
namespace {

constexpr const char* kRemedy = "correct the layout that was sent for this tensor";

Status Invalid(Reason reason, std::string message) {
  return {Code::kInvalidArgument, reason, std::move(message)};
}

Status OverLimit(std::string_view what, size_t count, size_t limit) {
  return {Code::kResourceExhausted, Reason::kLimitExceeded,
          std::to_string(count) + " " + std::string(what) + "; at most " + std::to_string(limit) +
              " are allowed"};
}

Status CheckName(const std::string& name, const LayoutLimits& limits) {
  if (name.empty()) return Invalid(Reason::kInvalidRequest, "a tensor has an empty name");
  if (name.size() > limits.name_bytes_max) {
    return OverLimit("bytes in a tensor's name", name.size(), limits.name_bytes_max);
  }
  return OkStatus();
}

Status CheckShape(DType dtype, const Shape& shape) {
  if (shape.size() > kMaxDims) {
    return Invalid(Reason::kInvalidRequest, "a tensor has " + std::to_string(shape.size()) +
                                                " dimensions; at most " + std::to_string(kMaxDims) +
                                                " are allowed");
  }
  for (int64_t extent : shape) {
    if (extent < 0) {
      return Invalid(Reason::kInvalidRequest, "negative extent " + std::to_string(extent));
    }
  }
  if (!StorageBytes(dtype, shape)) {
    return Invalid(Reason::kShapeOverflow, "the tensor's byte count does not fit 64 bits");
  }
  return OkStatus();
}

Status CheckBox(const TensorSpec& canonical, const Box& box) {
  const size_t ndim = canonical.shape.size();
  if (box.begin.size() != ndim || box.extent.size() != ndim) {
    return Invalid(Reason::kInvalidRequest, "a piece of " + canonical.name + " does not have its " +
                                                std::to_string(ndim) + " dimensions");
  }
  for (size_t d = 0; d < ndim; ++d) {
    if (box.extent[d] < 1) {
      return Invalid(Reason::kInvalidRequest, "a piece of " + canonical.name + " is empty");
    }
    const int64_t size = canonical.shape[d];
    if (box.begin[d] < 0 || box.extent[d] > size || box.begin[d] > size - box.extent[d]) {
      return Invalid(Reason::kShapeMismatch, "a piece leaves dimension " + std::to_string(d) +
                                                 " of " + canonical.name + ": expected at most " +
                                                 std::to_string(size) + ", found begin " +
                                                 std::to_string(box.begin[d]) + " and extent " +
                                                 std::to_string(box.extent[d]));
    }
  }
  return OkStatus();
}

/// `elements` is the element count of the local tensor's storage.
Status CheckPlacement(const Piece& piece, int64_t elements) {
  if (piece.local_stride.size() != piece.box.extent.size()) {
    return Invalid(Reason::kInvalidRequest, "a piece needs one stride for each dimension");
  }
  bool inside = piece.local_offset >= 0;
  int64_t last = piece.local_offset;
  for (size_t d = 0; d < piece.local_stride.size(); ++d) {
    if (piece.local_stride[d] < 1) {
      return Invalid(Reason::kInvalidRequest,
                     "a piece has stride " + std::to_string(piece.local_stride[d]));
    }
    int64_t span = 0;
    inside =
        inside && !__builtin_mul_overflow(piece.box.extent[d] - 1, piece.local_stride[d], &span);
    inside = inside && !__builtin_add_overflow(last, span, &last);
  }
  if (!inside || last >= elements) {
    return Invalid(Reason::kShapeMismatch,
                   "a piece leaves the tensor's storage: expected an end of at most " +
                       std::to_string(elements) + " elements, found one that begins at " +
                       std::to_string(piece.local_offset) + " and ends behind");
  }
  return OkStatus();
}

Status CheckPiece(const CanonicalSpace& canonical, const Piece& piece, int64_t elements) {
  if (piece.tensor >= canonical.tensors.size()) {
    return Invalid(Reason::kTensorMissing, "a piece names canonical tensor " +
                                               std::to_string(piece.tensor) + " of " +
                                               std::to_string(canonical.tensors.size()));
  }
  WW_RETURN_IF_ERROR(CheckBox(canonical.tensors[piece.tensor], piece.box));
  return CheckPlacement(piece, elements);
}

std::string Describe(const CanonicalSpace& canonical, const Piece& piece) {
  std::string text = canonical.tensors[piece.tensor].name + "[";
  for (size_t d = 0; d < piece.box.begin.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(piece.box.begin[d]) + ":" +
            std::to_string(piece.box.begin[d] + piece.box.extent[d]);
  }
  return text + "]";
}

Status CheckTensor(const CanonicalSpace& canonical, const LocalTensor& tensor,
                   const LayoutLimits& limits, int64_t& steps_left) {
  WW_RETURN_IF_ERROR(CheckName(tensor.name, limits));
  WW_RETURN_IF_ERROR(CheckShape(tensor.dtype, tensor.shape));
  const int64_t elements = *CheckedProduct(tensor.shape);
  for (const Piece& piece : tensor.pieces) {
    WW_RETURN_IF_ERROR(CheckPiece(canonical, piece, elements));
  }
  WW_ASSIGN_OR_STATUS(const auto overlap, FindOverlap(tensor.pieces, steps_left));
  if (!overlap) return OkStatus();
  const Piece& first = tensor.pieces[overlap->first];
  if (overlap->first == overlap->second) {
    return Invalid(
        Reason::kOverlappingShards,
        "two elements of the piece " + Describe(canonical, first) + " share a storage element");
  }
  return Invalid(Reason::kOverlappingShards,
                 "the pieces " + Describe(canonical, first) + " and " +
                     Describe(canonical, tensor.pieces[overlap->second]) +
                     " share a storage element");
}

/// Whether it holds codes that its rule makes scales for.
bool HoldsCodes(const TensorSpec& weight) {
  if (!IsFourBit(weight.scale_rule)) return weight.dtype == DType::kF8E4M3 && weight.packed == 1;
  return weight.dtype == DType::kI32 ? weight.packed == 8
                                     : weight.dtype == DType::kU8 && weight.packed == 2;
}

/// A weight with a block is a matrix of codes, and its scales are there.
Status CheckBlock(const CanonicalSpace& canonical, const TensorSpec& weight) {
  const bool described = HoldsCodes(weight) && weight.shape.size() == 2 && weight.block.size() == 2;
  const auto fits = [](int64_t size) { return size >= 1 && size <= kBlockMax; };
  if (!described || !std::ranges::all_of(weight.block, fits)) {
    return Invalid(Reason::kInvalidRequest,
                   "a block needs a matrix of F8_E4M3, or of four bits in U8 or I32, and rows and "
                   "columns of 1 to 65536");
  }
  Shape blocks;
  for (size_t d = 0; d < 2; ++d) {
    blocks.push_back(BlockCount(weight.shape[d], weight.block[d]));
  }
  const std::optional<uint32_t> scales = canonical.ScalesOf(weight.name);
  if (scales && canonical.tensors[*scales].shape == blocks) {
    const DType dtype = canonical.tensors[*scales].dtype;
    const DType kinds[] = {DType::kBF16, DType::kF16, DType::kF32};
    if (std::ranges::any_of(
            kinds, [&](DType from) { return CanStoreScales(weight.scale_rule, from, dtype); })) {
      return OkStatus();
    }
  }
  return Invalid(Reason::kShapeMismatch,
                 "its scales must be tensor " + std::string(UnpackedName(weight.name)) +
                     std::string(kScaleSuffixes[0]) + " or " + std::string(kScaleSuffixes[1]) +
                     ", [" + std::to_string(blocks[0]) + ", " + std::to_string(blocks[1]) +
                     "], of a dtype that its rule has");
}

Status CheckCanonical(const CanonicalSpace& canonical, const LayoutLimits& limits) {
  const auto& tensors = canonical.tensors;
  if (tensors.size() > limits.canonical_tensors_max) {
    return OverLimit("canonical tensors", tensors.size(), limits.canonical_tensors_max);
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    Status status = CheckName(tensors[i].name, limits);
    if (status.ok()) status = CheckShape(tensors[i].dtype, tensors[i].shape);
    if (status.ok() && i > 0 && tensors[i - 1].name >= tensors[i].name) {
      status =
          Invalid(Reason::kInvalidRequest, "canonical tensors must be unique and sorted by name");
    }
    if (!status.ok()) return std::move(status).AtTensor(tensors[i].name).Remedy(kRemedy);
  }
  for (const TensorSpec& tensor : tensors) {  // only now are names in order
    if (tensor.block.empty()) continue;
    Status status = CheckBlock(canonical, tensor);
    if (!status.ok()) return std::move(status).AtTensor(tensor.name).Remedy(kRemedy);
  }
  return OkStatus();
}

Status CheckCounts(const RankLayout& rank, const LayoutLimits& limits) {
  if (rank.tensors.size() > limits.local_tensors_per_rank_max) {
    return OverLimit("local tensors", rank.tensors.size(), limits.local_tensors_per_rank_max);
  }
  size_t pieces = 0;
  for (const LocalTensor& tensor : rank.tensors) pieces += tensor.pieces.size();
  if (pieces > limits.pieces_per_rank_max) {
    return OverLimit("pieces", pieces, limits.pieces_per_rank_max);
  }
  return OkStatus();
}

}  // namespace

Status ValidateRank(const CanonicalSpace& canonical, const RankLayout& rank,
                    const LayoutLimits& limits) {
  WW_RETURN_IF_ERROR(CheckCounts(rank, limits));
  int64_t steps_left = limits.overlap_steps_max;
  std::unordered_set<std::string_view> names;
  names.reserve(rank.tensors.size());
  for (const LocalTensor& tensor : rank.tensors) {
    Status status = CheckTensor(canonical, tensor, limits, steps_left);
    if (status.ok() && !names.insert(tensor.name).second) {
      status = Invalid(Reason::kInvalidRequest, "two local tensors have the same name");
    }
    if (!status.ok()) return std::move(status).AtTensor(tensor.name).Remedy(kRemedy);
  }
  return OkStatus();
}

Status Validate(const ModelLayout& layout, const LayoutLimits& limits) {
  WW_RETURN_IF_ERROR(CheckCanonical(layout.canonical, limits));
  if (layout.ranks.size() > limits.ranks_max) {
    return OverLimit("ranks", layout.ranks.size(), limits.ranks_max);
  }
  for (size_t rank = 0; rank < layout.ranks.size(); ++rank) {
    Status status = ValidateRank(layout.canonical, layout.ranks[rank], limits);
    if (!status.ok()) return std::move(status).AtRank("rank " + std::to_string(rank));
  }
  return OkStatus();
}

}  // namespace weightwire::layout
