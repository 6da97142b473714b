#include "server/plan/text.h"

namespace weightwire::plan {

std::string ShapeText(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t d = 0; d < shape.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(shape[d]);
  }
  return text + "]";
}

std::string BoxText(const layout::Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.begin.size(); ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(box.begin[d]) + ":" +
            std::to_string(box.begin[d] + box.extent[d]);
  }
  return text + "]";
}

std::string RankText(Side side, uint32_t rank) {
  return (side == Side::kSource ? "source/" : "target/") + std::to_string(rank);
}

}  // namespace weightwire::plan
