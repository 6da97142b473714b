#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/bytes_text.h"
#include "server/plan/explain.h"
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

std::string NameOf(const GroupNames& groups, Side side, uint32_t rank) {
  return (side == Side::kSource ? groups.source : groups.target) + "/" + std::to_string(rank);
}

std::string BytesBySide(const TransferPlan& plan, Side side, uint32_t count,
                        const GroupNames& groups) {
  std::vector<int64_t> bytes(count, 0);
  for (const Stream& stream : plan.streams) {
    bytes[side == Side::kSource ? stream.source_rank : stream.target_rank] += stream.bytes;
  }
  std::string text;
  for (uint32_t rank = 0; rank < count; ++rank) {
    text += "  " + NameOf(groups, side, rank) + (side == Side::kSource ? " sends " : " receives ") +
            BytesText(bytes[rank]) + "\n";
  }
  return text;
}

std::string Matrix(const TransferPlan& plan, const GroupNames& groups) {
  size_t width = 10;
  for (uint32_t t = 0; t < plan.target_ranks; ++t) {
    width = std::max(width, NameOf(groups, Side::kTarget, t).size() + 2);
  }
  std::vector<std::vector<int64_t>> bytes(plan.source_ranks,
                                          std::vector<int64_t>(plan.target_ranks, 0));
  size_t names = 0;
  for (uint32_t s = 0; s < plan.source_ranks; ++s) {
    names = std::max(names, NameOf(groups, Side::kSource, s).size() + 2);
  }
  for (const Stream& stream : plan.streams) {
    bytes[stream.source_rank][stream.target_rank] = stream.bytes;
  }
  std::string text = "from (row) to (column)\n" + Padded("", names);
  for (uint32_t t = 0; t < plan.target_ranks; ++t) {
    text += Padded(NameOf(groups, Side::kTarget, t), width);
  }
  text += '\n';
  for (uint32_t s = 0; s < plan.source_ranks; ++s) {
    text += Padded(NameOf(groups, Side::kSource, s), names);
    for (int64_t value : bytes[s]) text += Padded(value == 0 ? "-" : BytesText(value), width);
    text += '\n';
  }
  return text;
}

std::string StridedText(int64_t offset, std::span<const int64_t> stride) {
  std::string text = "@";
  return text += std::to_string(offset) + " strides " + ShapeText(stride);
}

std::string GatheredBySide(const TransferPlan& plan, const GroupNames& groups) {
  std::string text;
  for (const auto& [rank, gathered] : plan.gathered) {
    text += "  " + NameOf(groups, Side::kTarget, rank) + " gathers " +
            BytesText(GatherBufferBytes(gathered)) + " of " +
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
                     std::string_view tensor, const GroupNames& groups) {
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
      const std::string from_text =
          NameOf(groups, Side::kSource, stream.source_rank) + " " + from.name;
      const std::string rank_text = NameOf(groups, Side::kTarget, stream.target_rank) + " ";
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
    const std::string rank_text = NameOf(groups, Side::kTarget, rank) + " ";
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
                    std::string_view tensor, const GroupNames& names) {
  std::string text = "plan " + plan.id.ToHex() + ": " + BytesText(plan.bytes_total) + " in " +
                     std::to_string(plan.copies_total) + " copies and " +
                     std::to_string(plan.streams.size()) + " streams, from " +
                     std::to_string(plan.source_ranks) + " to " +
                     std::to_string(plan.target_ranks) + " ranks\n";
  text += BytesBySide(plan, Side::kSource, plan.source_ranks, names);
  text += BytesBySide(plan, Side::kTarget, plan.target_ranks, names);
  text += GatheredBySide(plan, names);
  if (plan.source_ranks <= kMatrixRanksMax && plan.target_ranks <= kMatrixRanksMax) {
    text += Matrix(plan, names);
  }
  if (!tensor.empty()) text += CopiesOf(plan, source, target, tensor, names);
  return text;
}

}  // namespace weightwire::plan
