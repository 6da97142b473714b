#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "kernels/delta.h"
#include "server/base/status.h"
#include "server/layout/types.h"

/// The code of what changed between two versions of a block of one tensor: the streams of
/// kernels/delta.h, each through zstd. Applied to the same older version it gives the newer one bit
/// for bit; whoever applies it compares the sum of the result, never of the code.
///
/// A code is, little-endian:
///   0   u8   version, 1
///   1   u8   kernels::DeltaOrder
///   2   u8   streams that are stored as they are, because zstd makes them no shorter: 1 gaps,
///            2 steps, 4 escapes
///   3   u8   0
///   4   u32  elements of the block
///   8   u32  of them changed
///   12  u32  bytes of the gaps
///   16  u32  escapes
///   20  u32  stored bytes of the gaps, 24 of the steps, 28 of the escapes
///   32       gaps; steps, two in a byte, the first in its low half; escapes, the lowest bytes of
///            all of them, then the next …
namespace weightwire::delta {

inline constexpr size_t kHeaderBytes = 32;

kernels::DeltaOrder OrderOf(layout::DType dtype);

/// How many elements the code says it changes; 0 where it is too short to say.
uint32_t ChangesOf(std::span<const std::byte> code);

/// Makes and applies codes of blocks up to a size, in memory of its own of about three times that
/// size. One thread at a time.
class Coder {
 public:
  /// `block_bytes_max` < 4 GiB.
  explicit Coder(size_t block_bytes_max);
  ~Coder();

  struct Code {
    /// Of this coder, until its next call. Empty when the code would take more than was allowed:
    /// then the block is sent as it is.
    std::span<const std::byte> bytes;
    size_t changes = 0;  ///< elements that differ
  };
  /// Both blocks have the same whole number of elements. `code_bytes_max`: such as the block's
  /// size.
  Code Encode(kernels::DeltaOrder order, std::span<const std::byte> base,
              std::span<const std::byte> now, size_t code_bytes_max);
  /// The same, and then `base` holds `now`, also when no code came of it. One pass does both.
  /// `sum`: null, or gets kernels::SumContiguous of `now`, in that pass too.
  Code EncodeAndCopy(kernels::DeltaOrder order, std::span<std::byte> base,
                     std::span<const std::byte> now, size_t code_bytes_max,
                     uint64_t* sum = nullptr);

  /// `target` holds the older version and gets the newer one. Total: whatever `code` holds, nothing
  /// outside of `target` is written, and no memory is taken.
  ///   kDataLoss / kInvalidRequest  not the code of such a block; some of `target` may have changed
  Status Apply(kernels::DeltaOrder order, std::span<const std::byte> code,
               std::span<std::byte> target);
  /// The same of the older version in `base`, which stays as it is: `target`, elsewhere and of the
  /// same size, gets the newer one. The sum, as kernels::SumContiguous, of what was written.
  Result<uint64_t> ApplyTo(kernels::DeltaOrder order, std::span<const std::byte> code,
                           std::span<const std::byte> base, std::span<std::byte> target);

 private:
  struct Scratch;
  size_t ElementsOf(kernels::DeltaOrder order, size_t bytes) const;
  /// The streams of a code of so many elements, in this coder's memory.
  Result<kernels::DeltaStreams> Decode(kernels::DeltaOrder order, std::span<const std::byte> code,
                                       size_t elements);
  Code EncodeWith(kernels::DeltaOrder order, std::span<const std::byte> base,
                  std::span<const std::byte> now, size_t code_bytes_max, std::byte* copy,
                  uint64_t* sum);
  const size_t block_bytes_max_;
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace weightwire::delta
