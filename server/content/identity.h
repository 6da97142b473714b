#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "kernels/keyed_sum.h"
#include "server/layout/types.h"

/// What a model's weights *are*, whoever holds them and however they are cut: equal content has an
/// equal root in every layout. Finds accidents, not attackers.
namespace weightwire::content {

/// What the keys of a tensor's elements are derived from (kernels/keyed_sum.h): its canonical name.
kernels::SumSeed SeedOf(std::string_view tensor);

/// Of a valid canonical tensor.
int64_t Elements(const layout::TensorSpec& tensor);

/// One canonical tensor with the dtype in which it is held, and the sum of all its elements.
struct Leaf {
  layout::TensorSpec tensor;
  kernels::KeyedSum sum;
  friend bool operator==(const Leaf&, const Leaf&) = default;
};

/// Of a tensor's shape only the number of its elements counts, as in a sum, which knows an element
/// by its place in row-major order: one engine may have a dimension split that another has joined
/// (layout/joined.h).
///
/// Of a Merkle tree over the leaves, which are in the order of their names; above tensors only. A
/// node without a neighbour moves up as it is. All zeros without leaves.
layout::Fingerprint RootOf(std::span<const Leaf> leaves);

/// Names, dtypes and counts of elements alone: contents of different classes (bf16 and fp8 engines,
/// or engines of which one leaves tensors out) have different roots and say nothing of each other.
layout::Fingerprint ClassOf(std::span<const Leaf> leaves);

}  // namespace weightwire::content
