#include "server/plan/classes.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <unordered_map>
#include <utility>

namespace weightwire::plan {
namespace {

/// Equal layouts have equal keys; the converse is checked element by element.
uint64_t KeyOf(const layout::RankLayout& rank) {
  uint64_t key = rank.tensors.size();
  for (const layout::LocalTensor& tensor : rank.tensors) {
    key = XXH3_64bits_withSeed(tensor.name.data(), tensor.name.size(), key);
    for (const layout::Piece& piece : tensor.pieces) {
      const auto& begin = piece.box.begin;
      key = XXH3_64bits_withSeed(begin.data(), begin.size() * sizeof begin[0], key ^ piece.tensor);
    }
  }
  return key;
}

}  // namespace

std::vector<LayoutClass> LayoutClasses(const layout::ModelLayout& layout) {
  std::vector<LayoutClass> classes;
  std::unordered_multimap<uint64_t, size_t> class_of;
  for (uint32_t rank = 0; rank < layout.ranks.size(); ++rank) {
    const uint64_t key = KeyOf(layout.ranks[rank]);
    auto [found, last] = class_of.equal_range(key);
    while (found != last && layout.ranks[classes[found->second].ranks[0]] != layout.ranks[rank]) {
      ++found;
    }
    if (found == last) {
      found = class_of.emplace(key, classes.size());
      classes.emplace_back();
    }
    classes[found->second].ranks.push_back(rank);
  }
  return classes;
}

layout::ModelLayout OnePerClass(layout::ModelLayout layout,
                                const std::vector<LayoutClass>& classes) {
  // Classes are ordered by their first rank, which is never before the class's own place.
  for (size_t c = 0; c < classes.size(); ++c) {
    if (classes[c].ranks[0] != c) {
      layout.ranks[c] = std::move(layout.ranks[classes[c].ranks[0]]);
    }
  }
  layout.ranks.resize(classes.size());
  return layout;
}

}  // namespace weightwire::plan
