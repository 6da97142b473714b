#include "client/cli/table.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <numeric>
#include <sstream>

namespace weightwire::cli {
namespace {

constexpr size_t kCellMin = 6;
constexpr size_t kGap = 2;
constexpr size_t kIndent = 4;  ///< of a reason below its row
constexpr size_t kReasonLines = 3;

bool StartsCharacter(char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; }

size_t Total(const std::vector<size_t>& widths) {
  return std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
}

/// Takes from the widest columns until a line fits, or all are as narrow as they may be.
void Fit(std::vector<size_t>& widths, size_t columns) {
  size_t total = Total(widths);
  while (total > columns) {
    size_t& widest = *std::max_element(widths.begin(), widths.end());
    if (widest <= kCellMin) return;
    --widest;
    --total;
  }
}

/// As many cells of `row` as there are widths.
std::string Line(const std::vector<std::string>& row, const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < widths.size(); ++i) {
    const std::string cell = Cut(row[i], widths[i]);
    line.append(cell).append(widths[i] - Width(cell) + kGap, ' ');
  }
  line.erase(line.find_last_not_of(' ') + 1);
  line.push_back('\n');
  return line;
}

}  // namespace

size_t Width(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), StartsCharacter));
}

std::string Cut(const std::string& text, size_t columns) {
  if (Width(text) <= columns) return text;
  size_t used = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (StartsCharacter(text[i]) && ++used == columns) return text.substr(0, i) + "…";
  }
  return "";
}

std::string Wrapped(const std::string& text, size_t columns, size_t lines) {
  if (columns == 0) return text;
  std::istringstream in(text);
  std::vector<std::string> out(1);
  for (std::string word; in >> word;) {
    if (!out.back().empty() && Width(out.back()) + 1 + Width(word) > columns) out.emplace_back();
    if (!out.back().empty()) out.back().push_back(' ');
    out.back().append(word);
  }
  std::string wrapped;
  for (size_t i = 0; i < std::min(out.size(), lines); ++i) {
    const bool cut = i + 1 == lines && out.size() > lines;
    if (i > 0) wrapped.push_back('\n');
    wrapped.append(Cut(out[i].append(cut ? " …" : ""), columns));
  }
  return wrapped;
}

std::vector<size_t> Table::Widths() const {
  std::vector<size_t> widths(rows_.front().size(), 0);
  for (const auto& row : rows_) {
    for (size_t i = 0; i < widths.size(); ++i) widths[i] = std::max(widths[i], Width(row[i]));
  }
  return widths;
}

std::string Table::Text(size_t columns) const {
  std::vector<size_t> widths = Widths();
  if (columns != 0) Fit(widths, columns);
  std::string text;
  for (const auto& row : rows_) text += Line(row, widths);
  return text + (rows_.size() == 1 ? "(none)\n" : "");
}

std::string Table::TextWithReasons(size_t columns) const {
  std::vector<size_t> widths = Widths();
  if (columns == 0 || Total(widths) <= columns) return Text(columns);
  widths.pop_back();
  Fit(widths, columns);
  std::string text = Line(rows_.front(), widths);
  for (auto row = rows_.begin() + 1; row != rows_.end(); ++row) {
    text += Line(*row, widths);
    if (row->back().empty() || row->back() == "-") continue;
    std::istringstream reason(Wrapped(row->back(), columns - kIndent, kReasonLines));
    for (std::string line; std::getline(reason, line);) {
      text.append(kIndent, ' ').append(line).push_back('\n');
    }
  }
  return text;
}

std::string Word(std::string name, std::string_view prefix) {
  if (name.compare(0, prefix.size(), prefix) == 0) name.erase(0, prefix.size());
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

std::string ClockText(double unix_seconds) {
  if (unix_seconds <= 0) return "-";
  const auto time = static_cast<std::time_t>(unix_seconds);
  std::tm parts{};
  localtime_r(&time, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%F %T", &parts);
  return text.data();
}

std::string PercentText(double share) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.2g %%", 100 * share);
  return text.data();
}

std::string SecondsText(double seconds) {
  std::array<char, 32> text{};
  if (seconds < 1) {
    std::snprintf(text.data(), text.size(), "%.1f ms", seconds * 1e3);
  } else {
    std::snprintf(text.data(), text.size(), "%.2f s", seconds);
  }
  return text.data();
}

}  // namespace weightwire::cli
