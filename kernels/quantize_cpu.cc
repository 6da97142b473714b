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
  void (*quantize_blocks)(const internal::RowOfBlocks& blocks);
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
  const auto& quantize = RoundsQuotients(scale) ? simd.quantize_own : simd.quantize;
  return {simd.amax[index], quantize[index], simd.quantize_blocks[index], ElementBytes(from)};
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

  bool in_place() const { return in_place_; }

  /// `part` is a row of blocks; `at`: where the first one's scale is among them.
  void RowOf(const Part& part, Bytes* scales, int64_t at) const {
    const int64_t scale_bytes = ScaleBytes(box_.scale, from_);
    loops_.quantize_blocks({part.codes, box_.target_stride[0],
                            scales == nullptr ? nullptr : scales + at * scale_bytes,
                            box_.scale_stride[1], part.source, box_.source_stride[0] * from_bytes(),
                            part.rows, part.columns, box_.block_columns, box_.scale});
  }

  /// One block of others.
  void Block(const Part& block, Bytes* scales, int64_t at) {
    uint32_t amax = AmaxOf(block);
    uint32_t scale = internal::ScaleInv(amax, box_.scale, from_);
    if (scales != nullptr) internal::StoreScale(scales, at, scale, box_.scale, from_);
    if (block.codes == nullptr) return;
    amax >= internal::kInfinityBits ? FillNan(block) : Codes(block, internal::AsFloat(scale));
  }

  int64_t from_bytes() const { return loops_.from_bytes; }

 private:
  size_t Gather(const Part& tile) {
    const int64_t packed[2] = {tile.columns, 1};
    internal::CopyBits(gathered_, tile.source, TileBox(tile, box_.source_stride, packed),
                       from_bytes());
    return static_cast<size_t>(tile.rows * tile.columns);
  }

  uint32_t AmaxOf(const Part& block) {
    uint32_t amax = 0;
    ForEachTile(block, box_, from_bytes(), [&](const Part& tile) {
      size_t count = Gather(tile);
      amax = std::max(amax, loops_.amax(gathered_, count));
    });
    return amax;
  }

  void Codes(const Part& block, float scale_inv) {
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
  for (int64_t row = 0; row < box.rows; row += box.block_rows) {
    const int64_t columns = quantizer.in_place() ? box.columns : box.block_columns;
    for (int64_t column = 0; column < box.columns; column += columns) {
      Part part = PartAt(whole, box, quantizer.from_bytes(), row, column);
      part.rows = std::min(part.rows, box.block_rows);
      part.columns = std::min(part.columns, columns);
      const int64_t scale = row / box.block_rows * box.scale_stride[0] +
                            column / box.block_columns * box.scale_stride[1];
      quantizer.in_place() ? quantizer.RowOf(part, scales, scale)
                           : quantizer.Block(part, scales, scale);
    }
  }
}

}  // namespace weightwire::kernels
