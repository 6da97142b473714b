#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace weightwire::cli {

/// A text table: one header row, cells left-aligned, columns two spaces apart.
class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  /// `row` has as many cells as the header.
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  /// Lines end with '\n', without trailing spaces. "(none)" below the header when there is no row.
  std::string Text() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// "a, b" of a list of strings.
template <typename Words>
std::string Joined(const Words& words) {
  std::string text;
  for (const std::string& word : words) {
    if (!text.empty()) text += ", ";
    text += word;
  }
  return text;
}
/// "ENGINE_STATE_SERVING" without its prefix → "serving".
std::string Word(std::string name, std::string_view prefix);
/// "2026-11-23 01:02:03" in local time; "-" for 0.
std::string ClockText(double unix_seconds);
/// "988.1 MB", "14.0 GB": decimal units, as network rates are given.
std::string BytesText(int64_t bytes);
/// "12.3 ms", "4.56 s".
std::string SecondsText(double seconds);

}  // namespace weightwire::cli
