// Runs of the tensor are summed where they lie. What is strided, transposed or cast goes by slabs
// through a buffer: as a dense image of the tensor with zeros for what the box does not cover,
// since zeros add nothing, or, where that would be mostly zeros, packed and run by run.
#include "kernels/keyed_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "kernels/simd.h"
#include "kernels/strided.h"

namespace weightwire::kernels {
namespace {

using internal::ElementsFrom;
using internal::ForEachIndex;
using internal::ForEachSlab;
using internal::KeepsBits;

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

constexpr int64_t kWord = 4;
constexpr int64_t kBlockBytes = kKeyedBlockWords * kWord;
constexpr int64_t kImageBytes = 32 << 10;
/// An image of at most this many times the box's elements is summed as a whole.
constexpr int64_t kSparsityMax = 8;
/// Columns at a time of what runs along another dimension in the source: a slab then has several
/// elements of each of its lines.
constexpr int64_t kTransposedColumns = 256;

using KeyTable = std::array<uint32_t, kKeyedBlockWords>;

constexpr KeyTable TableOf(uint64_t start) {
  KeyTable table{};
  for (uint64_t i = 0; i < table.size(); ++i) {
    table[i] = static_cast<uint32_t>(Mix(start + i) >> 32 | 1);
  }
  return table;
}

alignas(64) constexpr KeyTable kKeys[2] = {TableOf(kTable[0]), TableOf(kTable[1])};

class Adder {
 public:
  Adder(KeyedSum& sum, const SumSeed& seed) : sum_(sum), seed_(seed) {}

  /// `bytes` bytes of the tensor from byte `at` on.
  void Run(const unsigned char* data, int64_t at, int64_t bytes) {
    while (bytes > 0) {
      const int64_t in_block = at % kBlockBytes;
      const int64_t count = std::min(bytes, kBlockBytes - in_block);
      InBlock(data, at / kBlockBytes, in_block, count);
      data += count;
      at += count;
      bytes -= count;
    }
  }

 private:
  void InBlock(const unsigned char* data, int64_t block, int64_t at, int64_t bytes) {
    uint64_t sums[2] = {0, 0};
    if (at % kWord != 0) {
      const int64_t count = std::min(bytes, kWord - at % kWord);
      Part(data, at, count, sums);
      data += count;
      at += count;
      bytes -= count;
    }
    const int64_t words = bytes / kWord;
    internal::Simd().keyed_words(data, static_cast<size_t>(words), kKeys[0].data() + at / kWord,
                                 kKeys[1].data() + at / kWord, sums);
    if (bytes % kWord != 0) Part(data + words * kWord, at + words * kWord, bytes % kWord, sums);
    for (int lane = 0; lane < 2; ++lane) {
      const uint64_t key = Mix(seed_.lane[lane] + kGolden * static_cast<uint64_t>(block + 1)) | 1;
      sum_.lane[lane] += key * sums[lane];
    }
  }

  /// Some bytes of one word.
  static void Part(const unsigned char* data, int64_t at, int64_t bytes, uint64_t sums[2]) {
    unsigned char padded[kWord] = {};
    std::memcpy(padded + at % kWord, data, static_cast<size_t>(bytes));
    uint32_t word = 0;
    std::memcpy(&word, padded, sizeof word);
    for (int lane = 0; lane < 2; ++lane) {
      sums[lane] += uint64_t{kKeys[lane][static_cast<size_t>(at / kWord)]} * word;
    }
  }

  KeyedSum& sum_;
  const SumSeed& seed_;
};

/// The innermost dimension is contiguous on both sides.
bool InPlace(const StridedBox& box) {
  const int last = box.ndim - 1;
  return last < 0 || (box.source_stride[last] == 1 && box.target_stride[last] == 1);
}

/// Elements that are laid out as the tensor has them, run by run.
void AddRuns(Adder& add, const unsigned char* data, const StridedBox& box, int64_t bytes,
             int64_t first) {
  const bool runs = box.ndim > 0 && InPlace(box);
  const int64_t elements = runs ? box.extent[box.ndim - 1] : 1;
  ForEachIndex(box, runs ? box.ndim - 1 : box.ndim, [&](int64_t offset, int64_t place) {
    add.Run(data + offset * bytes, (first + place) * bytes, elements * bytes);
  });
}

bool Transposed(const StridedBox& box) {
  const int last = box.ndim - 1;
  return last > 0 && box.source_stride[last] > box.source_stride[last - 1];
}

int64_t TargetSpan(const StridedBox& box) {
  int64_t last = 0;
  for (int d = 0; d < box.ndim; ++d) last += (box.extent[d] - 1) * box.target_stride[d];
  return last + 1;
}

void AddSlab(Adder& add, const unsigned char* source, const StridedBox& slab, Element from,
             Element to, int64_t first) {
  alignas(64) unsigned char buffer[kImageBytes];
  const int64_t bytes = ElementBytes(to);
  const int64_t span = TargetSpan(slab);
  if (span * bytes <= kImageBytes && span <= kSparsityMax * ElementsFrom(slab, 0)) {
    std::memset(buffer, 0, static_cast<size_t>(span * bytes));
    Copy(buffer, source, slab, from, to);
    return add.Run(buffer, first * bytes, span * bytes);
  }
  Copy(buffer, source, WithPackedTarget(slab), from, to);
  AddRuns(add, buffer, Normalize(WithPackedSource(slab)), bytes, first);
}

/// Elements of a slab so that, as a rule, its image fits the buffer.
int64_t SlabElements(const StridedBox& box, int64_t bytes) {
  const int64_t inner = box.ndim > 0 ? box.target_stride[box.ndim - 1] : 1;
  return kImageBytes / bytes / std::clamp<int64_t>(inner, 1, kSparsityMax);
}

// Not inlined: g++ 12 believes then that Normalize leaves extents out.
[[gnu::noinline]] void AddSlabs(Adder& add, const unsigned char* data, const StridedBox& normal,
                                Element from, Element to, int64_t first) {
  const int64_t from_bytes = ElementBytes(from);
  ForEachSlab(normal, SlabElements(normal, ElementBytes(to)),
              [&](const StridedBox& slab, int64_t offset, int64_t place) {
                AddSlab(add, data + offset * from_bytes, slab, from, to, first + place);
              });
}

}  // namespace

void AddKeyed(KeyedSum& sum, const SumSeed& seed, const void* source, const StridedBox& box,
              Element from, Element to, int64_t first) {
  internal::RequireCast(from, to);
  const auto* data = static_cast<const unsigned char*>(source);
  Adder add(sum, seed);
  const StridedBox normal = Normalize(box);
  const int last = normal.ndim - 1;
  if (KeepsBits(from, to) && InPlace(normal))
    return AddRuns(add, data, normal, ElementBytes(to), first);
  if (!Transposed(normal)) return AddSlabs(add, data, normal, from, to, first);
  StridedBox columns = normal;
  for (int64_t at = 0; at < normal.extent[last]; at += kTransposedColumns) {
    columns.extent[last] = std::min(kTransposedColumns, normal.extent[last] - at);
    AddSlabs(add, data + at * normal.source_stride[last] * ElementBytes(from), columns, from, to,
             first + at * normal.target_stride[last]);
  }
}

}  // namespace weightwire::kernels
