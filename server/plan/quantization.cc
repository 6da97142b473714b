#include "server/plan/quantization.h"

#include <algorithm>

#include "server/layout/blocks.h"

namespace weightwire::plan {

using layout::BlockCount;
using layout::Box;
using layout::DType;
using layout::TensorSpec;

namespace {

/// kernels/four_bit.h
constexpr int64_t kFourBitGroupMin = 8;
constexpr int64_t kFourBitGroupMax = 256;

/// Codes of four bits in one element of the dtype that the rule's are packed in; 0: not of it.
int64_t PackedIn(layout::ScaleRule rule, DType to) {
  if (rule == layout::ScaleRule::kInt4) return to == DType::kI32 ? 8 : 0;
  return to == DType::kU8 ? 2 : 0;
}

/// Of codes and scales of four bits, whose block is of two sizes.
std::optional<std::string> FourBitDefect(const CopyOp& op) {
  const bool scales = op.transform == Transform::kScales;
  if (layout::IsNvFp4(op.rule)) return "makes codes by the largest of a whole tensor";
  const int64_t packed = scales ? 1 : PackedIn(op.rule, op.target_dtype);
  int64_t group = 0;
  if (packed == 0 || __builtin_mul_overflow(op.block[1], packed, &group) || op.block[0] != 1 ||
      group < kFourBitGroupMin || group > kFourBitGroupMax || group % kFourBitGroupMin != 0) {
    return "has no groups of four bits";
  }
  int64_t read = 0;
  const bool whole = op.source_extent[0] == op.extent[0] &&
                     !__builtin_mul_overflow(op.extent[1], scales ? group : packed, &read) &&
                     op.source_extent[1] == read && read % group == 0;
  return whole ? std::nullopt : std::optional<std::string>("cuts groups of four bits");
}

}  // namespace

const std::vector<int64_t>& SourceExtent(const CopyOp& op) {
  return op.source_extent.empty() ? op.extent : op.source_extent;
}

bool IsQuantizable(DType from) {
  return from == DType::kBF16 || from == DType::kF16 || from == DType::kF32;
}

bool CanMake(Transform transform, layout::ScaleRule rule, DType from, DType to) {
  if (!IsQuantizable(from)) return false;
  if (transform == Transform::kScales) return layout::CanStoreScales(rule, from, to);
  return layout::IsFourBit(rule) ? PackedIn(rule, to) > 0 : to == DType::kF8E4M3;
}

int MakesNumber(const CopyOp& op) {
  if (op.transform == Transform::kElements) return 0;
  return static_cast<int>(op.transform) + 2 * static_cast<int>(op.rule);
}

bool SetMakes(int number, CopyOp& op) {
  op.transform = Transform::kElements;
  op.rule = layout::ScaleRule::kQuotient;
  if (number == 0) return true;
  if (number < 0 || number > 2 + 2 * static_cast<int>(layout::kLastScaleRule)) return false;
  op.transform = number % 2 == 1 ? Transform::kCodes : Transform::kScales;
  op.rule = static_cast<layout::ScaleRule>((number - 1) / 2);
  return true;
}

TensorSpec Unpacked(const TensorSpec& weight) {
  TensorSpec unpacked = weight;
  if (weight.packed == 1) return unpacked;
  unpacked.name = layout::UnpackedName(weight.name);
  unpacked.shape[1] *= weight.packed;
  unpacked.block[1] *= weight.packed;
  unpacked.packed = 1;
  return unpacked;
}

Box Unpacked(const TensorSpec& weight, Box packed) {
  if (weight.packed == 1) return packed;
  packed.begin[1] *= weight.packed;
  packed.extent[1] *= weight.packed;
  return packed;
}

Box Packed(const TensorSpec& weight, Box box) {
  if (weight.packed == 1) return box;
  box.begin[1] /= weight.packed;
  box.extent[1] /= weight.packed;
  return box;
}

bool IsWholeBlocks(const TensorSpec& weight, const Box& box) {
  for (size_t d = 0; d < weight.block.size(); ++d) {
    const int64_t end = box.begin[d] + box.extent[d];
    if (!layout::IsWholeBlocks(box.begin[d], end, weight.shape[d], weight.block[d])) return false;
  }
  return true;
}

std::optional<Box> WholeBlocksIn(const TensorSpec& weight, Box box) {
  for (size_t d = 0; d < weight.block.size(); ++d) {
    const int64_t size = weight.block[d];
    const int64_t end = box.begin[d] + box.extent[d];
    const int64_t first = BlockCount(box.begin[d], size) * size;
    const int64_t last = end == weight.shape[d] ? end : end / size * size;
    if (first >= last) return std::nullopt;
    box.begin[d] = first;
    box.extent[d] = last - first;
  }
  return box;
}

Box ScalesOf(const TensorSpec& weight, const Box& box) {
  Box scales = box;
  for (size_t d = 0; d < weight.block.size(); ++d) {
    scales.begin[d] = box.begin[d] / weight.block[d];
    scales.extent[d] = BlockCount(box.extent[d], weight.block[d]);
  }
  return scales;
}

Box ElementsOf(const TensorSpec& weight, const Box& scales) {
  Box box = scales;
  for (size_t d = 0; d < weight.block.size(); ++d) {
    box.begin[d] = scales.begin[d] * weight.block[d];
    const int64_t end = (scales.begin[d] + scales.extent[d]) * weight.block[d];
    box.extent[d] = std::min(end, weight.shape[d]) - box.begin[d];
  }
  return box;
}

std::optional<std::string> QuantizationDefect(const CopyOp& op) {
  const bool to_scales = op.transform == Transform::kScales;
  const bool makes = op.transform != Transform::kElements;
  const bool four_bits = makes && layout::IsFourBit(op.rule);
  if (op.transform < Transform::kElements || op.transform > Transform::kScales)
    return "makes what is unknown";
  if (op.block.empty() && op.source_extent.empty() && op.transform == Transform::kElements) {
    return std::nullopt;
  }
  if (op.block.size() != 2 || op.extent.size() != 2 ||
      op.source_extent.size() != (to_scales || four_bits ? 2 : 0)) {
    return "has blocks, but not the extents of a matrix";
  }
  for (size_t d = 0; d < 2; ++d) {
    if (op.block[d] < 1 || op.block[d] > layout::kBlockMax)
      return "has a block of no or too many rows";
    if (to_scales &&
        (op.source_extent[d] < 1 || BlockCount(op.source_extent[d], op.block[d]) != op.extent[d])) {
      return "has not one scale for each block";
    }
  }
  if (!makes) return std::nullopt;
  if (four_bits) {
    if (const auto defect = FourBitDefect(op)) return defect;
  }
  if (CanMake(op.transform, op.rule, op.source_dtype, op.target_dtype)) return std::nullopt;
  return std::string("makes ") + (to_scales ? "scales" : "codes") + " of " +
         std::string(layout::DTypeName(op.source_dtype)) + " into " +
         std::string(layout::DTypeName(op.target_dtype));
}

}  // namespace weightwire::plan
