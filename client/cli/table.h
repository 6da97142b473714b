#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weightwire::cli {

/// A text table: one header row, cells left-aligned, columns two spaces apart.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  /// `row` has as many cells as the header.
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  size_t rows() const { return rows_.size() - 1; }
  /// Lines end with '\n', without trailing spaces. "(none)" below the header when there is no row.
  /// With `columns`, lines are no longer than that if it can be done: the longest cells are cut.
  std::string Text(size_t columns = 0) const;
  /// The same, but where a line would be longer, what the last column says of a row (a reason; "-":
  /// nothing) stands in lines of its own below it, at most three: cut to a few letters it says
  /// nothing.
  std::string TextWithReasons(size_t columns) const;

 private:
  std::vector<size_t> Widths() const;

  std::vector<std::vector<std::string>> rows_;
};

/// "a, b" of a list of strings.
template <typename Words>
std::string Joined(const Words& words) {
  std::string text;
  for (const auto& word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}
/// "a, b, c and 997 more", `more` of which are not in `words`.
template <typename Words>
std::string FirstOf(const Words& words, int shown = 3, uint32_t more = 0) {
  std::string text;
  int count = 0;
  for (const auto& word : words) {
    if (++count > shown) {
      ++more;
      continue;
    }
    if (!text.empty()) text += ", ";
    text += word;
  }
  return more == 0 ? text : text + " and " + std::to_string(more) + " more";
}
/// How many columns of a screen the text takes: UTF-8 continuation bytes take none.
size_t Width(const std::string& text);
/// At most `columns` of them, the last one "…" if some are left out; UTF-8 sequences stay whole.
std::string Cut(const std::string& text, size_t columns);
/// `text` in lines of at most `columns` (0: one line), broken at spaces; at most `lines` of them.
std::string Wrapped(const std::string& text, size_t columns, size_t lines);
/// "ENGINE_STATE_SERVING" without its prefix → "serving".
std::string Word(std::string name, std::string_view prefix);
/// "2026-11-23 01:02:03" in local time; "-" for 0.
std::string ClockText(double unix_seconds);
/// "3.1 %" of 0.031.
std::string PercentText(double share);
/// "12.3 ms", "4.56 s".
std::string SecondsText(double seconds);

}  // namespace weightwire::cli
