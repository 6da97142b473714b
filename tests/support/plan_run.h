#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/layout/types.h"
#include "server/plan/plan.h"

/// Runs plans element by element on small arrays; shares nothing with kernels or transfer.
namespace weightwire::testing {

/// Storage of all ranks: [rank][local tensor][element]. Elements are opaque numbers: casts are not
/// made, and codes and scales are stood for by numbers that tell which elements share a block.
using Memory = std::vector<std::vector<std::vector<uint64_t>>>;
inline constexpr uint64_t kUntouched = ~uint64_t{0};

inline Memory EmptyMemory(const layout::ModelLayout& layout) {
  Memory memory;
  for (const auto& rank : layout.ranks) {
    auto& tensors = memory.emplace_back();
    for (const auto& tensor : rank.tensors) {
      size_t elements = 1;
      for (int64_t size : tensor.shape) elements *= static_cast<size_t>(size);
      tensors.emplace_back(elements, kUntouched);
    }
  }
  return memory;
}

/// Calls visit(index) for each index of a block, in row-major order.
template <typename Visit>
void ForEachIndex(const std::vector<int64_t>& extent, Visit visit) {
  std::vector<int64_t> index(extent.size(), 0);
  while (true) {
    visit(index);
    size_t d = extent.size();
    while (d > 0 && ++index[d - 1] == extent[d - 1]) index[--d] = 0;
    if (d == 0) return;
  }
}

inline size_t StridedAt(int64_t offset, const std::vector<int64_t>& stride,
                        const std::vector<int64_t>& index) {
  for (size_t d = 0; d < index.size(); ++d) offset += index[d] * stride[d];
  return static_cast<size_t>(offset);
}

/// What stands for the scale of a block that has these elements, in any order.
inline uint64_t ScaleOf(const std::vector<uint64_t>& elements) {
  uint64_t sum = 0;
  for (uint64_t element : elements) {
    element = (element ^ element >> 31) * 0x9e3779b97f4a7c15;
    sum += (element ^ element >> 29) * 0xbf58476d1ce4e5b9;
  }
  return sum;
}
/// What stands for the code of an element in a block with this scale.
inline uint64_t CodeOf(uint64_t element, uint64_t scale) { return ScaleOf({element, ~scale}); }

/// What stands for several codes in one element, the first one first.
inline uint64_t PackedOf(const std::vector<uint64_t>& codes) {
  uint64_t packed = codes.size();
  for (uint64_t code : codes) packed = ScaleOf({packed * 0x9e3779b97f4a7c15 + 1, code});
  return packed;
}

/// Codes of which several lie in one element, as `op` makes them of groups within a row.
inline uint64_t PackedValueOf(const plan::CopyOp& op, const std::vector<uint64_t>& from,
                              const std::vector<int64_t>& index) {
  const int64_t each = op.source_extent.at(1) / op.extent.at(1);
  const int64_t group = op.block.at(1) * each;
  const auto at = [&](int64_t column) {
    return from.at(StridedAt(op.source_offset, op.source_stride, {index[0], column}));
  };
  std::vector<uint64_t> elements, codes;
  for (int64_t i = 0; i < group; ++i) elements.push_back(at(index[1] * each / group * group + i));
  for (int64_t i = 0; i < each; ++i) {
    codes.push_back(CodeOf(at(index[1] * each + i), ScaleOf(elements)));
  }
  return PackedOf(codes);
}

/// What `op` writes at `index`: blocks are counted from its own first element.
inline uint64_t ValueOf(const plan::CopyOp& op, const std::vector<uint64_t>& from,
                        const std::vector<int64_t>& index) {
  if (op.transform == plan::Transform::kElements) {
    return from.at(StridedAt(op.source_offset, op.source_stride, index));
  }
  const bool codes = op.transform == plan::Transform::kCodes;
  if (codes && !op.source_extent.empty()) return PackedValueOf(op, from, index);
  std::vector<int64_t> begin, extent;
  for (size_t d = 0; d < 2; ++d) {
    const int64_t block = op.block.at(d);
    begin.push_back((codes ? index[d] / block : index[d]) * block);
    extent.push_back(std::min(block, (codes ? op.extent : op.source_extent).at(d) - begin[d]));
  }
  std::vector<uint64_t> elements;
  ForEachIndex(extent, [&](const std::vector<int64_t>& in_block) {
    elements.push_back(from.at(StridedAt(op.source_offset, op.source_stride,
                                         {begin[0] + in_block[0], begin[1] + in_block[1]})));
  });
  const uint64_t scale = ScaleOf(elements);
  if (!codes) return scale;
  return CodeOf(from.at(StridedAt(op.source_offset, op.source_stride, index)), scale);
}

/// Returns how often an element was written that had been written before.
inline int64_t RunCopy(const plan::CopyOp& op, const std::vector<uint64_t>& from,
                       std::vector<uint64_t>& to) {
  int64_t rewrites = 0;
  ForEachIndex(op.extent, [&](const std::vector<int64_t>& index) {
    uint64_t& element = to.at(StridedAt(op.target_offset, op.target_stride, index));
    if (element != kUntouched) ++rewrites;
    element = ValueOf(op, from, index);
  });
  return rewrites;
}

/// Copies what the plan says, makes what ranks make of what they gather. Out-of-range accesses
/// throw. Returns how often an element was written that had been written before.
inline int64_t RunPlan(const plan::TransferPlan& plan, const Memory& source, Memory& target) {
  int64_t rewrites = 0;
  for (const auto& [rank, gathered] : plan.gathered) {
    target.at(rank).emplace_back(static_cast<size_t>(gathered.elements), kUntouched);
  }
  for (const plan::Stream& stream : plan.streams) {
    for (const plan::CopyOp& op : stream.ops) {
      rewrites += RunCopy(op, source.at(stream.source_rank).at(op.source_tensor),
                          target.at(stream.target_rank).at(op.target_tensor));
    }
  }
  for (const auto& [rank, gathered] : plan.gathered) {
    const std::vector<uint64_t> floats = std::move(target[rank].back());
    target[rank].pop_back();
    for (const plan::CopyOp& op : gathered.made) {
      if (op.source_tensor != target[rank].size()) ++rewrites;  // reads what is not gathered
      rewrites += RunCopy(op, floats, target[rank].at(op.target_tensor));
    }
  }
  return rewrites;
}

/// Changes one thing that a copy of a matrix says, the `what`th of kMistakes, along `dimension`, by
/// `by`. `other`: a rule that what it makes is not of.
inline constexpr int64_t kMistakes = 8;
inline void Mistake(plan::CopyOp& op, int64_t what, size_t dimension, int64_t by,
                    layout::ScaleRule other) {
  switch (what) {
    case 0:
      op.source_offset += by * op.source_stride[dimension];
      return;
    case 1:
      op.target_offset += by * op.target_stride[dimension];
      return;
    case 2:
      op.extent[dimension] += by;
      return;
    case 3:
      op.source_stride[dimension] += by;
      return;
    case 4:
      op.target_stride[dimension] += by;
      return;
    case 5:
      if (!op.block.empty()) op.block[dimension] += by;
      return;
    case 6:
      if (op.transform != plan::Transform::kElements) op.rule = other;
      return;
    default:
      if (!op.source_extent.empty()) op.source_extent[dimension] += by;
      return;
  }
}

/// Makes the bytes that a plan states those of its copies.
inline void CountBytes(plan::TransferPlan& plan) {
  plan.bytes_total = 0;
  for (plan::Stream& stream : plan.streams) {
    stream.bytes = 0;
    for (const plan::CopyOp& op : stream.ops) stream.bytes += plan::WireBytes(op);
    plan.bytes_total += stream.bytes;
  }
}

/// A different number for every canonical element of small models.
inline uint64_t ElementId(uint32_t tensor, const std::vector<int64_t>& shape,
                          const std::vector<int64_t>& element) {
  uint64_t flat = 0;
  for (size_t d = 0; d < shape.size(); ++d) {
    flat = flat * static_cast<uint64_t>(shape[d]) + static_cast<uint64_t>(element[d]);
  }
  return (uint64_t{tensor} + 1) << 40 | flat;
}

/// What memory must hold: each piece's elements by ElementId, everything else untouched.
inline Memory FilledMemory(const layout::ModelLayout& layout) {
  Memory memory = EmptyMemory(layout);
  for (size_t r = 0; r < layout.ranks.size(); ++r) {
    for (size_t t = 0; t < layout.ranks[r].tensors.size(); ++t) {
      for (const layout::Piece& piece : layout.ranks[r].tensors[t].pieces) {
        ForEachIndex(piece.box.extent, [&](const std::vector<int64_t>& index) {
          std::vector<int64_t> element = index;
          for (size_t d = 0; d < index.size(); ++d) element[d] += piece.box.begin[d];
          memory[r][t].at(StridedAt(piece.local_offset, piece.local_stride, index)) =
              ElementId(piece.tensor, layout.canonical.tensors[piece.tensor].shape, element);
        });
      }
    }
  }
  return memory;
}

}  // namespace weightwire::testing
