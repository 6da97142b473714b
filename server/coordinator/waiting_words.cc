#include "server/coordinator/waiting_words.h"

#include <algorithm>
#include <span>
#include <utility>

namespace weightwire::coordinator {
namespace {

using Words = std::pair<std::string_view, std::string_view>;

constexpr Words kAwaited[] = {{"prepared", "still getting ready"},
                              {"sourced", "still being read"},
                              {"staged", "still receiving"},
                              {"swapped", "still switching to the new version"},
                              {"drained", "still releasing the aborted version"},
                              {"publish", "has not published"},
                              {"register", "has not registered"},
                              {"layout", "has not sent its layout"},
                              {"silent", "has said nothing for a while"},
                              {"suspect", "is cut off: its agent's connection ended"},
                              {"absent", "is cut off: its agent's connection and its lease ended"},
                              {"plans", "still planning"},
                              {"durable", "still writing the decision"},
                              {"commit", "must commit"}};

constexpr Words kReports[] = {{"prepared", "ready"},
                              {"sourced", "all bytes read"},
                              {"staged", "received"},
                              {"swapped", "switched to the new version"},
                              {"drained", "released the aborted version"}};

constexpr Words kStates[] = {{"dirty", "incomplete (needs refill)"}, {"cut_off", "cut off"}};

std::string_view Find(std::span<const Words> table, std::string_view word) {
  const auto found = std::ranges::find(table, word, &Words::first);
  return found == table.end() ? std::string_view() : found->second;
}

std::string_view Or(std::string_view found, std::string_view word) {
  return found.empty() ? word : found;
}

}  // namespace

std::string WaitingInWords(std::string_view waiting) {
  std::string text;
  while (!waiting.empty()) {
    const size_t colon = waiting.find(": ");
    text += waiting.substr(0, colon);
    if (colon == std::string_view::npos) break;
    waiting.remove_prefix(colon + 2);
    // Only a word that ends a list's item: others are what people and systems said.
    const std::string_view word = waiting.substr(0, waiting.find_first_of(" ,;"));
    const std::string_view rest = waiting.substr(word.size());
    const bool ends = rest.empty() || !rest.starts_with(' ') || rest.starts_with(" and ");
    const std::string_view words = ends ? Find(kAwaited, word) : std::string_view();
    if (words.empty()) {
      text += ": ";
      continue;
    }
    text.append(" ").append(words);
    waiting = rest;
  }
  return text;
}

std::string_view ReportInWords(std::string_view report) {
  return Or(Find(kReports, report), report);
}

std::string_view StateInWords(std::string_view state) { return Or(Find(kStates, state), state); }

std::string_view KindInWords(epoch::Kind kind) {
  constexpr std::string_view kNames[] = {"", "publish", "fill", "rollback"};
  return kNames[static_cast<int>(kind)];
}

}  // namespace weightwire::coordinator
