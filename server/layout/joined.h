#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "server/layout/types.h"

/// Two descriptions of one model may give a tensor two shapes of the same elements in the same
/// row-major order: a family splits gpt-oss's gate and up, which alternate in the last dimension,
/// into [experts, hidden, intermediate, 2]; a checkpoint, and whoever describes what transformers
/// holds, has [experts, hidden, 2 · intermediate]. Only the split shape has boxes for both, so
/// where two such layouts meet, the pieces of the joined one are expressed in it.
namespace weightwire::layout {

/// Of each dimension of `joined`, how many neighbouring dimensions of `split` it consists of; 0 for
/// one of extent 1 that `split` does not have. nullopt when `split` is not `joined` with dimensions
/// split, or when there are no elements.
std::optional<std::vector<size_t>> PartsOf(const Shape& joined, const Shape& split);

/// A tensor of a canonical space, and how its dimensions come apart.
struct SplitTensor {
  uint32_t tensor = 0;  ///< index into CanonicalSpace::tensors
  Shape shape;
  std::vector<size_t> parts;  ///< PartsOf(the tensor's shape, `shape`)
};

/// What must be split in `a`, and what in `b`, so that tensors of one name have one shape; by
/// tensor, ascending. Tensors whose shapes differ otherwise are not named. Both must be sorted by
/// name. A tensor with a `block` is not split.
std::pair<std::vector<SplitTensor>, std::vector<SplitTensor>> SplitsBetween(
    const CanonicalSpace& a, const CanonicalSpace& b);

/// The same model, layout, or rank, with the shapes of `splits`. A range of a joined dimension that
/// begins and ends within slices of what it consists of is several pieces: at most 2n − 1 for n
/// dimensions. Needs layouts that are valid.
///   kResourceExhausted / kLimitExceeded  a rank would have more pieces than LayoutLimits allow
CanonicalSpace Split(CanonicalSpace canonical, std::span<const SplitTensor> splits);
Result<RankLayout> Split(const RankLayout& rank, std::span<const SplitTensor> splits);
Result<ModelLayout> Split(const ModelLayout& layout, std::span<const SplitTensor> splits);

/// Equal for canonical spaces of which one is the other with dimensions split: of a shape only the
/// number of elements counts.
Fingerprint ElementsFingerprintOf(const CanonicalSpace& canonical);

}  // namespace weightwire::layout
