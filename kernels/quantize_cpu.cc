// Each block is read twice, for its largest magnitude and for its codes; the second time from the
// cache unless it is larger than that. Rows that are contiguous on both sides are worked on in
// place; other matrices go by tiles that are gathered into a packed buffer and scattered from one.
#include "kernels/quantize.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/element.h"
#include "kernels/simd.h"
#include "kernels/strided.h"

namespace weightwire::kernels {
namespace {

using Bytes = unsigned char;

constexpr int64_t kTileElements = 4096;

struct Loops {
  uint32_t (*amax)(const void* source, size_t count);
  void (*quantize)(void* codes, const void* source, size_t count, float scale_inv);
  void (*quantize_groups)(void* codes, void* scales, const void* source, size_t count, size_t group,
                          ScaleKind kind);
  int64_t from_bytes;
};

Loops ChooseLoops(Element from, ScaleKind scale) {
  if (from < Element::kBF16) {
    std::fprintf(stderr, "kernels: element kind %d is no float and cannot be quantized\n",
                 static_cast<int>(from));
    std::abort();
  }
  int index = static_cast<int>(from) - static_cast<int>(Element::kBF16);
  const internal::SimdKernels& simd = internal::Simd();
  const auto& quantize = scale == ScaleKind::kOwnKind ? simd.quantize_own : simd.quantize;
  return {simd.amax[index], quantize[index], simd.quantize_groups[index], ElementBytes(from)};
}

/// One block, or a tile of one.
struct Part {
  Bytes* codes;  ///< null when only scales are made
  const Bytes* source;
  int64_t rows;
  int64_t columns;
};

Part PartAt(const Part& whole, const QuantizeBox& box, int64_t from_bytes, int64_t row,
            int64_t column) {
  const int64_t code = row * box.target_stride[0] + column * box.target_stride[1];
  return {whole.codes == nullptr ? nullptr : whole.codes + code,
          whole.source + (row * box.source_stride[0] + column * box.source_stride[1]) * from_bytes,
          whole.rows - row, whole.columns - column};
}

/// visit(part) for parts of at most kTileElements.
template <class Visit>
void ForEachTile(const Part& block, const QuantizeBox& box, int64_t from_bytes, Visit visit) {
  int64_t columns = std::min(block.columns, kTileElements);
  int64_t rows = kTileElements / columns;
  for (int64_t row = 0; row < block.rows; row += rows) {
    for (int64_t column = 0; column < block.columns; column += columns) {
      Part tile = PartAt(block, box, from_bytes, row, column);
      tile.rows = std::min(tile.rows, rows);
      tile.columns = std::min(tile.columns, columns);
      visit(tile);
    }
  }
}

StridedBox TileBox(const Part& tile, const int64_t* source_stride, const int64_t* target_stride) {
  return {2,
          {tile.rows, tile.columns},
          {source_stride[0], source_stride[1]},
          {target_stride[0], target_stride[1]}};
}

class Quantizer {
 public:
  Quantizer(const QuantizeBox& box, Element from)
      : box_(box),
        from_(from),
        loops_(ChooseLoops(from, box.scale)),
        in_place_((box.source_stride[1] == 1 && box.target_stride[1] == 1) || box.columns == 1) {}

  /// `at`: where the block's scale is among them.
  void Block(const Part& block, Bytes* scales, int64_t at) {
    uint32_t amax = in_place_ ? AmaxOfRows(block) : AmaxOfTiles(block);
    uint32_t scale = internal::ScaleInv(amax, box_.scale, from_);
    if (scales != nullptr) internal::StoreScale(scales, at, scale, box_.scale, from_);
    if (block.codes == nullptr) return;
    if (amax >= internal::kInfinityBits) return FillNan(block);
    in_place_ ? QuantizeRows(block, internal::AsFloat(scale))
              : QuantizeTiles(block, internal::AsFloat(scale));
  }

  /// Blocks lie in single rows, one behind the other, and so do their scales.
  bool HasGroups(const Bytes* scales) const {
    return in_place_ && box_.block_rows == 1 && box_.columns > box_.block_columns &&
           (scales == nullptr || box_.scale_stride[1] == 1);
  }
  /// A row of blocks.
  void Groups(const Part& row, Bytes* scales) const {
    loops_.quantize_groups(row.codes, scales, row.source, static_cast<size_t>(row.columns),
                           static_cast<size_t>(box_.block_columns), box_.scale);
  }

  int64_t from_bytes() const { return loops_.from_bytes; }

 private:
  uint32_t AmaxOfRows(const Part& block) const {
    uint32_t amax = 0;
    for (int64_t row = 0; row < block.rows; ++row) {
      Part at = PartAt(block, box_, from_bytes(), row, 0);
      amax = std::max(amax, loops_.amax(at.source, static_cast<size_t>(block.columns)));
    }
    return amax;
  }

  void QuantizeRows(const Part& block, float scale_inv) const {
    for (int64_t row = 0; row < block.rows; ++row) {
      Part at = PartAt(block, box_, from_bytes(), row, 0);
      loops_.quantize(at.codes, at.source, static_cast<size_t>(block.columns), scale_inv);
    }
  }

  size_t Gather(const Part& tile) {
    const int64_t packed[2] = {tile.columns, 1};
    internal::CopyBits(gathered_, tile.source, TileBox(tile, box_.source_stride, packed),
                       from_bytes());
    return static_cast<size_t>(tile.rows * tile.columns);
  }

  uint32_t AmaxOfTiles(const Part& block) {
    uint32_t amax = 0;
    ForEachTile(block, box_, from_bytes(), [&](const Part& tile) {
      size_t count = Gather(tile);
      amax = std::max(amax, loops_.amax(gathered_, count));
    });
    return amax;
  }

  void QuantizeTiles(const Part& block, float scale_inv) {
    ForEachTile(block, box_, from_bytes(), [&](const Part& tile) {
      size_t count = Gather(tile);
      loops_.quantize(codes_, gathered_, count, scale_inv);
      const int64_t packed[2] = {tile.columns, 1};
      internal::CopyBits(tile.codes, codes_, TileBox(tile, packed, box_.target_stride), 1);
    });
  }

  void FillNan(const Part& block) const {
    for (int64_t row = 0; row < block.rows; ++row) {
      for (int64_t column = 0; column < block.columns; ++column) {
        *PartAt(block, box_, from_bytes(), row, column).codes = 0x7f;
      }
    }
  }

  const QuantizeBox& box_;
  const Element from_;
  const Loops loops_;
  const bool in_place_;
  alignas(64) Bytes gathered_[kTileElements * 4];
  alignas(64) Bytes codes_[kTileElements];
};

}  // namespace

void QuantizeE4M3(void* codes, void* scale_inv, const void* source, const QuantizeBox& box,
                  Element from) {
  Quantizer quantizer(box, from);
  Part whole{static_cast<Bytes*>(codes), static_cast<const Bytes*>(source), box.rows, box.columns};
  auto* scales = static_cast<Bytes*>(scale_inv);
  const auto scale_bytes = ScaleBytes(box.scale, from);
  const bool groups = quantizer.HasGroups(scales);
  for (int64_t row = 0; row < box.rows; row += box.block_rows) {
    if (groups) {
      Bytes* here = scales == nullptr ? nullptr : scales + row * box.scale_stride[0] * scale_bytes;
      quantizer.Groups(PartAt(whole, box, quantizer.from_bytes(), row, 0), here);
      continue;
    }
    for (int64_t column = 0; column < box.columns; column += box.block_columns) {
      Part block = PartAt(whole, box, quantizer.from_bytes(), row, column);
      block.rows = std::min(block.rows, box.block_rows);
      block.columns = std::min(block.columns, box.block_columns);
      int64_t scale = row / box.block_rows * box.scale_stride[0] +
                      column / box.block_columns * box.scale_stride[1];
      quantizer.Block(block, scales, scale);
    }
  }
}

}  // namespace weightwire::kernels
