#include <algorithm>

#include "server/base/checked.h"
#include "server/layout/types.h"

namespace weightwire::layout {

std::optional<Box> Intersect(const Box& a, const Box& b) {
  WW_CHECK(a.begin.size() == b.begin.size());
  const size_t ndim = a.begin.size();
  Box common{std::vector<int64_t>(ndim), std::vector<int64_t>(ndim)};
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t begin = std::max(a.begin[d], b.begin[d]);
    const int64_t end = std::min(a.begin[d] + a.extent[d], b.begin[d] + b.extent[d]);
    if (end <= begin) return std::nullopt;
    common.begin[d] = begin;
    common.extent[d] = end - begin;
  }
  return common;
}

int64_t ElementCount(const Box& box) {
  int64_t count = 1;
  for (int64_t extent : box.extent) count *= extent;
  return count;
}

std::optional<int64_t> StorageBytes(DType dtype, std::span<const int64_t> shape) {
  const std::optional<int64_t> elements = CheckedProduct(shape);
  int64_t bytes = 0;
  if (!elements || __builtin_mul_overflow(*elements, int64_t{ElementBytes(dtype)}, &bytes)) {
    return std::nullopt;
  }
  return bytes;
}

std::optional<uint32_t> CanonicalSpace::Find(std::string_view name) const {
  const auto it = std::lower_bound(
      tensors.begin(), tensors.end(), name,
      [](const TensorSpec& tensor, std::string_view wanted) { return tensor.name < wanted; });
  if (it == tensors.end() || it->name != name) return std::nullopt;
  return static_cast<uint32_t>(it - tensors.begin());
}

std::optional<uint32_t> CanonicalSpace::WeightOf(uint32_t scales) const {
  const auto name = WeightNameOf(tensors[scales].name);
  if (!name) return std::nullopt;
  for (std::string_view suffix : {std::string_view(), kPackedSuffix}) {
    const std::optional<uint32_t> weight = Find(std::string(*name).append(suffix));
    if (weight && !tensors[*weight].block.empty()) return weight;
  }
  return std::nullopt;
}

std::optional<uint32_t> CanonicalSpace::ScalesOf(std::string_view weight) const {
  for (std::string_view suffix : kScaleSuffixes) {
    if (const auto scales = Find(std::string(UnpackedName(weight)).append(suffix))) return scales;
  }
  return std::nullopt;
}

std::string_view UnpackedName(std::string_view weight) {
  if (weight.ends_with(kPackedSuffix)) weight.remove_suffix(kPackedSuffix.size());
  return weight;
}

std::optional<std::string_view> WeightNameOf(std::string_view scales) {
  for (std::string_view suffix : kScaleSuffixes) {
    if (scales.ends_with(suffix)) return scales.substr(0, scales.size() - suffix.size());
  }
  return std::nullopt;
}

}  // namespace weightwire::layout
