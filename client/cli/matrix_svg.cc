#include "client/cli/matrix_svg.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "client/cli/table.h"
#include "server/base/bytes_text.h"

namespace weightwire::cli {
namespace {

constexpr uint32_t kCellsMax = 128;
constexpr int kMargin = 70;
constexpr int kSidePixels = 640;

std::string Escaped(const std::string& text) {
  std::string safe;
  for (char c : text) {
    switch (c) {
      case '&':
        safe += "&amp;";
        break;
      case '<':
        safe += "&lt;";
        break;
      case '>':
        safe += "&gt;";
        break;
      case '"':
        safe += "&quot;";
        break;
      default:
        safe += c;
    }
  }
  return safe;
}

/// Ranks of one side, folded into at most kCellsMax cells of equal width.
class Axis {
 public:
  explicit Axis(uint32_t ranks)
      : ranks_(ranks),
        fold_(std::max(1u, (ranks + kCellsMax - 1) / kCellsMax)),
        cells_((ranks + fold_ - 1) / fold_) {}
  uint32_t cells() const { return cells_; }
  uint32_t CellOf(uint32_t rank) const { return rank / fold_; }
  std::string Name(uint32_t cell) const {
    const uint32_t first = cell * fold_;
    const uint32_t last = std::min(ranks_, first + fold_) - 1;
    return first == last ? std::to_string(first)
                         : std::to_string(first) + "-" + std::to_string(last);
  }

 private:
  uint32_t ranks_;
  uint32_t fold_;
  uint32_t cells_;
};

std::string Text(int x, int y, const std::string& anchor, const std::string& text) {
  return "<text x=\"" + std::to_string(x) + "\" y=\"" + std::to_string(y) + "\" text-anchor=\"" +
         anchor + "\">" + Escaped(text) + "</text>\n";
}

/// White for nothing; from light to dark blue as `part` of the greatest goes from 0 to 1.
std::string Colour(double part) {
  const auto mix = [&](int light, int dark) {
    return std::to_string(static_cast<int>(light + (dark - light) * part));
  };
  return "rgb(" + mix(222, 8) + "," + mix(235, 48) + "," + mix(247, 107) + ")";
}

}  // namespace

std::string MatrixSvg(const plan::TransferPlan& plan, const std::string& title) {
  const Axis rows(plan.source_ranks);
  const Axis columns(plan.target_ranks);
  std::vector<int64_t> bytes(size_t{rows.cells()} * columns.cells(), 0);
  for (const plan::Stream& stream : plan.streams) {
    bytes[size_t{rows.CellOf(stream.source_rank)} * columns.cells() +
          columns.CellOf(stream.target_rank)] += stream.bytes;
  }
  int64_t most = 1;
  for (int64_t cell : bytes) most = std::max(most, cell);
  const int cell = std::clamp(
      kSidePixels / static_cast<int>(std::max({rows.cells(), columns.cells(), 1u})), 5, 40);
  const int width = cell * static_cast<int>(columns.cells());
  const int height = cell * static_cast<int>(rows.cells());

  std::string svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" +
                    std::to_string(std::max(width, kSidePixels) + 2 * kMargin) + "\" height=\"" +
                    std::to_string(height + 2 * kMargin) +
                    "\" font-family=\"sans-serif\" font-size=\"11\">\n"
                    "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  svg += Text(kMargin, 20, "start", title);
  svg += Text(kMargin, 36, "start",
              BytesText(plan.bytes_total) +
                  "; rows: source ranks, columns: target ranks; darkest: " + BytesText(most) +
                  ", white: nothing");
  svg += "<rect x=\"" + std::to_string(kMargin) + "\" y=\"" + std::to_string(kMargin) +
         "\" width=\"" + std::to_string(width) + "\" height=\"" + std::to_string(height) +
         "\" fill=\"none\" stroke=\"#999\"/>\n";
  // A label every so many cells, so that they do not run into each other.
  const auto row_step = static_cast<uint32_t>(std::max(1, 14 / cell));
  const auto column_step = static_cast<uint32_t>(std::max(1, 40 / cell));
  for (uint32_t r = 0; r < rows.cells(); r += row_step) {
    svg += Text(kMargin - 4, kMargin + static_cast<int>(r) * cell + std::min(cell, 11), "end",
                rows.Name(r));
  }
  for (uint32_t c = 0; c < columns.cells(); c += column_step) {
    svg += Text(kMargin + static_cast<int>(c) * cell, kMargin - 5, "start", columns.Name(c));
  }
  for (uint32_t r = 0; r < rows.cells(); ++r) {
    for (uint32_t c = 0; c < columns.cells(); ++c) {
      const int64_t count = bytes[size_t{r} * columns.cells() + c];
      if (count == 0) continue;
      svg += "<rect x=\"" + std::to_string(kMargin + static_cast<int>(c) * cell) + "\" y=\"" +
             std::to_string(kMargin + static_cast<int>(r) * cell) + "\" width=\"" +
             std::to_string(cell) + "\" height=\"" + std::to_string(cell) + "\" fill=\"" +
             Colour(static_cast<double>(count) / static_cast<double>(most)) + "\"><title>source " +
             rows.Name(r) + " to target " + columns.Name(c) + ": " + BytesText(count) +
             "</title></rect>\n";
    }
  }
  return svg + "</svg>\n";
}

}  // namespace weightwire::cli
