#include "server/layout/schemes/option.h"

#include <algorithm>
#include <charconv>

namespace weightwire::layout {
namespace {

std::optional<int64_t> ParseInteger(std::string_view text, int64_t least) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    return std::nullopt;
  }
  return value;
}

}  // namespace

Status BadOption(std::string_view key, std::string_view value, std::string_view wanted) {
  return {
      Code::kInvalidArgument, Reason::kUnknownScheme,
      "option " + std::string(key) + "=" + std::string(value) + " is not " + std::string(wanted)};
}

Result<std::optional<int64_t>> IntegerOption(const ParallelSpec& spec, const std::string& key,
                                             int64_t least) {
  const auto it = spec.options.find(key);
  if (it == spec.options.end()) return std::optional<int64_t>();
  const std::optional<int64_t> value = ParseInteger(it->second, least);
  if (!value) {
    return Fail(BadOption(key, it->second, "a number from " + std::to_string(least) + " on"));
  }
  return value;
}

Result<bool> FlagOption(const ParallelSpec& spec, const std::string& key) {
  const auto it = spec.options.find(key);
  if (it == spec.options.end()) return false;
  if (it->second == "true") return true;
  return Fail(BadOption(key, it->second, "a word without a value"));
}

Result<int64_t> LayersWithMtp(const ModelConfig& config, const ParallelSpec& spec) {
  WW_ASSIGN(const MtpWord word, MtpOption(spec));
  return config.layers + (word == MtpWord::kNone ? 0 : config.mtp_layers);
}

Result<MtpWord> MtpOption(const ParallelSpec& spec) {
  constexpr std::string_view kWords[] = {"none", "single", "fused"};
  WW_ASSIGN(const std::optional<size_t> word, ChoiceOption(spec, "mtp", kWords));
  return word ? static_cast<MtpWord>(*word + 1) : MtpWord::kUnsaid;
}

Result<std::optional<size_t>> ChoiceOption(const ParallelSpec& spec, const std::string& key,
                                           std::span<const std::string_view> choices) {
  const auto it = spec.options.find(key);
  if (it == spec.options.end()) return std::optional<size_t>();
  const auto found = std::find(choices.begin(), choices.end(), it->second);
  if (found != choices.end()) {
    return std::optional<size_t>(static_cast<size_t>(found - choices.begin()));
  }
  std::string known(choices.front());
  for (size_t i = 1; i < choices.size(); ++i) {
    known.append(i + 1 == choices.size() ? " or " : ", ").append(choices[i]);
  }
  return Fail(BadOption(key, it->second, known));
}

std::vector<std::string_view> SplitList(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t at = text.find(separator); at != std::string_view::npos; at = text.find(separator)) {
    parts.push_back(text.substr(0, at));
    text.remove_prefix(at + 1);
  }
  parts.push_back(text);
  return parts;
}

Result<std::vector<int64_t>> ParseDashedList(std::string_view key, std::string_view text) {
  std::vector<int64_t> values;
  for (std::string_view part : SplitList(text, '-')) {
    const std::optional<int64_t> value = ParseInteger(part, 0);
    if (!value) return Fail(BadOption(key, text, "a list of numbers like 7-7-6"));
    values.push_back(*value);
  }
  return values;
}

}  // namespace weightwire::layout
