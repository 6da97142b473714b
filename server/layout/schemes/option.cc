#include "server/layout/schemes/option.h"

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
  const auto it = spec.options.find("mtp");
  if (it == spec.options.end()) return config.layers + config.mtp_layers;
  if (it->second == "none") return config.layers;
  return Fail(BadOption("mtp", it->second, "none"));
}

Result<std::vector<int64_t>> ParseDashedList(std::string_view key, std::string_view text) {
  std::vector<int64_t> values;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const size_t dash = rest.find('-');
    const std::optional<int64_t> value = ParseInteger(rest.substr(0, dash), 0);
    if (!value) return Fail(BadOption(key, text, "a list of numbers like 7-7-6"));
    values.push_back(*value);
    more = dash != std::string_view::npos;
    if (more) rest.remove_prefix(dash + 1);
  }
  return values;
}

}  // namespace weightwire::layout
