#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/delta.h"
#include "kernels/four_bit.h"
#include "kernels/kernels.h"
#include "kernels/quantize.h"

/// Internal to kernels/: the inner loops that depend on the instruction set. One body
/// (simd_body.inc) is compiled once per set; `Simd()` answers the best one for this machine, so
/// that one binary runs on any CPU of its architecture.
namespace weightwire::kernels::internal {

/// Storage of a streaming sum. Only the set of loops that began a sum may continue it.
struct alignas(64) SumState {
  unsigned char bytes[640];
};

/// Blocks side by side, whose rows are contiguous.
struct RowOfBlocks {
  unsigned char* codes;   ///< null: scales only
  int64_t code_stride;    ///< from a row to the next one, in bytes
  unsigned char* scales;  ///< null: codes only
  int64_t scale_stride;   ///< from a block's to the next one's, in scales
  const unsigned char* source;
  int64_t source_stride;  ///< from a row to the next one, in bytes
  int64_t rows, columns;  ///< of all of them
  int64_t block_columns;  ///< the last block may have fewer
  ScaleKind scale;
};

struct SimdKernels {
  const char* name;
  uint64_t (*sum)(const void* data, size_t bytes);
  void (*sum_begin)(SumState* state);
  void (*sum_add)(SumState* state, const void* data, size_t bytes);
  uint64_t (*sum_end)(const SumState* state);
  /// Copies past the caches, like `stream`, and adds the very bytes that are stored to the sum.
  void (*copy_and_add)(SumState* state, void* target, const void* source, size_t bytes);
  /// The same of a source that is in a cache and that nobody writes meanwhile.
  void (*add_and_stream)(SumState* state, void* target, const void* source, size_t bytes);
  /// Adds `seen` to a sum of its own and does what `copy_and_add` does, in turns that find in the
  /// first cache what `seen` has brought there where it is `source` by another name.
  void (*see_copy_and_add)(SumState* seen_sum, SumState* state, const void* seen, void* target,
                           const void* source, size_t bytes);
  /// Copy that does not leave `target` in the caches; call `stream_end` once after the last one of
  /// it and of the three above.
  void (*stream)(void* target, const void* source, size_t bytes);
  void (*stream_end)();
  /// Adds Σ word · key, each a 32-bit number, mod 2^64 to each lane of kernels/keyed_sum.h.
  void (*keyed_words)(const void* data, size_t words, const uint32_t* keys0, const uint32_t* keys1,
                      uint64_t sums[2]);
  /// [from][to] over kBF16, kF16, kF32 (index = Element - kBF16); null on the diagonal.
  /// Contiguous on both sides; any alignment.
  void (*cast[3][3])(void* target, const void* source, size_t count);
  /// [from] over kBF16, kF16, kF32. The largest magnitude, as f32 bits; a NaN counts above
  /// infinity.
  uint32_t (*amax[3])(const void* source, size_t count);
  /// [from]: element / scale_inv to e4m3, see kernels/quantize.h. `scale_inv` is finite.
  void (*quantize[3])(void* codes, const void* source, size_t count, float scale_inv);
  /// The same with quotients rounded to `from` first.
  void (*quantize_own[3])(void* codes, const void* source, size_t count, float scale_inv);
  /// [from]: codes and scales of a row of blocks.
  void (*quantize_blocks[3])(const RowOfBlocks& blocks);
  /// [from]: codes and scales of so many groups, one behind the other; see kernels/four_bit.h.
  void (*four_bit[3])(void* codes, void* scales, const void* source, size_t groups, size_t group,
                      FourBitKind kind, float global);
  /// See kernels/delta.h. `sum` may be null; all of `now` is added to it.
  bool (*delta_scan)(DeltaOrder order, const void* base, const void* now, size_t elements,
                     size_t changes_max, DeltaStreams* out, void* copy, SumState* sum);
  /// DeltaApply from one array into another one, past the caches; what is stored is added to `sum`.
  bool (*delta_apply)(DeltaOrder order, void* target, const void* base, size_t elements,
                      const DeltaStreams* delta, SumState* sum);
};

const SimdKernels& Simd();

/// Every set that this machine can run, so that tests reach them all; the plainest is the first,
/// the best the last.
std::span<const SimdKernels* const> SimdVariants();

extern const SimdKernels kSimdBaseline;
#if defined(__x86_64__)
extern const SimdKernels kSimdAvx2;
extern const SimdKernels kSimdAvx512;
#endif

}  // namespace weightwire::kernels::internal
