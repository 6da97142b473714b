#include "server/plan/quantization.h"

#include <algorithm>

#include "server/layout/blocks.h"

namespace weightwire::plan {

using layout::BlockCount;
using layout::Box;
using layout::DType;
using layout::TensorSpec;

const std::vector<int64_t>& SourceExtent(const CopyOp& op) {
  return op.transform == Transform::kScales ? op.source_extent : op.extent;
}

bool IsQuantizable(DType from) {
  return from == DType::kBF16 || from == DType::kF16 || from == DType::kF32;
}

bool CanMake(Transform transform, layout::ScaleRule rule, DType from, DType to) {
  if (!IsQuantizable(from)) return false;
  return transform == Transform::kCodes ? to == DType::kF8E4M3
                                        : layout::CanStoreScales(rule, from, to);
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
  if (op.transform < Transform::kElements || op.transform > Transform::kScales)
    return "makes what is unknown";
  if (op.block.empty() && op.source_extent.empty() && op.transform == Transform::kElements) {
    return std::nullopt;
  }
  if (op.block.size() != 2 || op.extent.size() != 2 ||
      op.source_extent.size() != (to_scales ? 2 : 0)) {
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
  if (op.transform == Transform::kElements) return std::nullopt;
  if (CanMake(op.transform, op.rule, op.source_dtype, op.target_dtype)) return std::nullopt;
  return std::string("makes ") + (to_scales ? "scales" : "codes") + " of " +
         std::string(layout::DTypeName(op.source_dtype)) + " into " +
         std::string(layout::DTypeName(op.target_dtype));
}

}  // namespace weightwire::plan
