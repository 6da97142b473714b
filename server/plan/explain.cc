#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/plan/locator.h"
#include "server/plan/plan.h"
#include "server/plan/text.h"

namespace weightwire::plan {
namespace {

using layout::ModelLayout;

constexpr uint32_t kMatrixRanksMax = 16;

std::string Padded(std::string text, size_t width) {
  return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}

std::string BytesBySide(const TransferPlan& plan, Side side, uint32_t ranks) {
  std::vector<int64_t> bytes(ranks, 0);
  for (const Stream& stream : plan.streams) {
    bytes[side == Side::kSource ? stream.source_rank : stream.target_rank] += stream.bytes;
  }
  std::string text;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    text += "  " + RankText(side, rank) + (side == Side::kSource ? " sends " : " receives ") +
            std::to_string(bytes[rank]) + " bytes\n";
  }
  return text;
}

std::string Matrix(const TransferPlan& plan) {
  constexpr size_t kWidth = 14;
  std::vector<std::vector<int64_t>> bytes(plan.source_ranks,
                                          std::vector<int64_t>(plan.target_ranks, 0));
  for (const Stream& stream : plan.streams) {
    bytes[stream.source_rank][stream.target_rank] = stream.bytes;
  }
  std::string text = "bytes from source (row) to target (column)\n" + Padded("", kWidth);
  for (uint32_t t = 0; t < plan.target_ranks; ++t) {
    text += Padded(RankText(Side::kTarget, t), kWidth);
  }
  text += '\n';
  for (uint32_t s = 0; s < plan.source_ranks; ++s) {
    text += Padded(RankText(Side::kSource, s), kWidth);
    for (int64_t value : bytes[s]) text += Padded(std::to_string(value), kWidth);
    text += '\n';
  }
  return text;
}

std::string StridedText(int64_t offset, std::span<const int64_t> stride) {
  std::string text = "@";
  return text += std::to_string(offset) + " strides " + ShapeText(stride);
}

std::string GatheredBySide(const TransferPlan& plan) {
  std::string text;
  for (const auto& [rank, gathered] : plan.gathered) {
    text += "  " + RankText(Side::kTarget, rank) + " gathers " +
            std::to_string(GatherBufferBytes(gathered)) + " bytes of " +
            std::string(layout::DTypeName(gathered.dtype)) +
            ", blocks of which no source rank holds all, and quantizes them\n";
  }
  return text;
}

std::string QuantizedText(const CopyOp& op) {
  if (op.transform == Transform::kElements) return "";
  constexpr const char* kRules[] = {"",
                                    ", scales powers of two",
                                    ", scales in the source's dtype",
                                    ", scales powers of two as compressed-tensors rounds them",
                                    ", MXFP4",
                                    ", MXFP4 as compressed-tensors rounds its scales",
                                    ", NVFP4",
                                    ", INT4"};
  const std::string blocks =
      " of blocks " + ShapeText(op.block) + kRules[static_cast<size_t>(op.rule)];
  if (op.transform == Transform::kCodes) return "  quantized: codes" + blocks;
  return "  quantized: scales" + blocks + " in elements " + ShapeText(op.source_extent);
}

/// `box`: what the copy moves or makes of the tensor.
std::string CopyText(const std::optional<layout::Box>& box, const std::string& from,
                     const std::string& to, const CopyOp& op) {
  return "  " + (box ? BoxText(*box) : std::string("(no canonical box)")) + "  " + from + " " +
         std::string(layout::DTypeName(op.source_dtype)) +
         StridedText(op.source_offset, op.source_stride) + " -> " + to + " " +
         std::string(layout::DTypeName(op.target_dtype)) +
         StridedText(op.target_offset, op.target_stride) + QuantizedText(op) + "\n";
}

/// What `op` gathers, judged by its source.
std::optional<layout::Box> GatheredBox(const layout::LocalTensor& from, uint32_t canonical,
                                       const CopyOp& op) {
  const auto element = PieceLocator(from).ElementAt(canonical, op.source_offset);
  if (!element) return std::nullopt;
  return layout::Box{*element, op.extent};
}

std::string CopiesOf(const TransferPlan& plan, const ModelLayout& source, const ModelLayout& target,
                     std::string_view tensor) {
  const auto found = std::lower_bound(plan.tensor_names.begin(), plan.tensor_names.end(), tensor);
  if (found == plan.tensor_names.end() || *found != tensor) {
    return "the plan knows no tensor '" + std::string(tensor) + "'\n";
  }
  const auto canonical = static_cast<uint32_t>(found - plan.tensor_names.begin());
  std::string text = "copies of " + std::string(tensor) + "\n";
  for (const Stream& stream : plan.streams) {
    for (const CopyOp& op : stream.ops) {
      if (op.canonical != canonical) continue;
      const auto& from = source.ranks[stream.source_rank].tensors[op.source_tensor];
      const std::string from_text = RankText(Side::kSource, stream.source_rank) + " " + from.name;
      const std::string rank_text = RankText(Side::kTarget, stream.target_rank) + " ";
      const auto& tensors = target.ranks[stream.target_rank].tensors;
      if (op.target_tensor == tensors.size()) {
        const auto same = source.canonical.Find(tensor);
        const uint32_t read = same ? *same : *source.canonical.Find(layout::UnpackedName(tensor));
        text += CopyText(GatheredBox(from, read, op), from_text, rank_text + "(gathered)", op);
        continue;
      }
      const auto& to = tensors[op.target_tensor];
      text += CopyText(TargetBox(PieceLocator(to), op), from_text, rank_text + to.name, op);
    }
  }
  for (const auto& [rank, gathered] : plan.gathered) {
    const std::string rank_text = RankText(Side::kTarget, rank) + " ";
    for (const CopyOp& op : gathered.made) {
      if (op.canonical != canonical) continue;
      const auto& to = target.ranks[rank].tensors[op.target_tensor];
      text += CopyText(TargetBox(PieceLocator(to), op), rank_text + "(gathered)",
                       rank_text + to.name, op);
    }
  }
  return text;
}

}  // namespace

std::string Explain(const TransferPlan& plan, const ModelLayout& source, const ModelLayout& target,
                    std::string_view tensor) {
  std::string text = "plan " + plan.id.ToHex() + ": " + std::to_string(plan.bytes_total) +
                     " bytes in " + std::to_string(plan.copies_total) + " copies and " +
                     std::to_string(plan.streams.size()) + " streams, from " +
                     std::to_string(plan.source_ranks) + " to " +
                     std::to_string(plan.target_ranks) + " ranks\n";
  text += BytesBySide(plan, Side::kSource, plan.source_ranks);
  text += BytesBySide(plan, Side::kTarget, plan.target_ranks);
  text += GatheredBySide(plan);
  if (plan.source_ranks <= kMatrixRanksMax && plan.target_ranks <= kMatrixRanksMax) {
    text += Matrix(plan);
  }
  if (!tensor.empty()) text += CopiesOf(plan, source, target, tensor);
  return text;
}

}  // namespace weightwire::plan
