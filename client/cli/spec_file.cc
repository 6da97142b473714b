#include "client/cli/spec_file.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <optional>
#include <set>

#include "client/cli/offline.h"
#include "server/layout/scheme_words.h"

namespace weightwire::cli {
namespace {

using layout::SchemeWords;

tl::unexpected<Status> Bad(const std::string& path, const YAML::Mark& mark, const std::string& what,
                           const std::string& remedy) {
  std::string message = path;
  if (!mark.is_null()) message.append(":").append(std::to_string(mark.line + 1));
  message.append(": ").append(what);
  return Fail(
      Status(Code::kInvalidArgument, Reason::kConfigInvalid, std::move(message)).Remedy(remedy));
}

bool Contains(const std::vector<std::string_view>& words, const std::string& word) {
  return std::ranges::find(words, word) != words.end();
}

std::string KnownKeys(const SchemeWords& words) {
  std::string text = "scheme";
  for (const auto* list : {&words.sizes, &words.options}) {
    for (std::string_view word : *list) text.append(", ").append(word);
  }
  return text;
}

bool IsNumber(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

/// What may stand in a spec: a word's value has neither separators nor blanks.
bool IsValue(const std::string& text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) {
    return c > ' ' && c < '\x7f' && c != ',' && c != '=';
  });
}

/// A scalar, or the parts of a list joined as the words' values are; nullopt for anything else.
std::optional<std::string> TextOf(const YAML::Node& node) {
  if (node.IsScalar()) return node.Scalar();
  if (!node.IsSequence() || node.size() == 0) return std::nullopt;
  bool numbers = true;
  for (const YAML::Node& item : node) {
    if (!item.IsScalar()) return std::nullopt;
    numbers = numbers && IsNumber(item.Scalar());
  }
  std::string text;
  for (const YAML::Node& item : node) {
    if (!text.empty()) text += numbers ? '-' : '|';
    text += item.Scalar();
  }
  return text;
}

/// One word of the spec; empty for a flag that is false.
Result<std::string> WordOf(const std::string& path, const std::string& scheme,
                           const SchemeWords& words, const YAML::Node& name,
                           const YAML::Node& value) {
  const std::string& key = name.Scalar();
  const bool is_size = Contains(words.sizes, key);
  if (!is_size && !Contains(words.options, key)) {
    return Bad(path, name.Mark(), "scheme " + scheme + " does not know \"" + key + "\"",
               "it knows " + KnownKeys(words));
  }
  if (is_size) {
    if (value.IsScalar() && IsNumber(value.Scalar())) return key + value.Scalar();
    return Bad(path, value.Mark(), key + " must be a number", "write it as in \"" + key + ": 2\"");
  }
  const std::optional<std::string> text = TextOf(value);
  if (!text || !IsValue(*text)) {
    return Bad(
        path, value.Mark(),
        key + " must be a value without blanks, commas and equals signs, or a list of such",
        "write it as in \"" + key + ": 2\", \"" + key + ": true\" or \"" + key + ": [a, b]\"");
  }
  if (*text == "false") return std::string();
  return *text == "true" ? key : key + "=" + *text;
}

Result<std::string> SpecOf(const std::string& path, const YAML::Node& root) {
  constexpr const char* kExample =
      "write \"scheme: megatron\", then one line for each word, as tp: 2";
  if (!root.IsMap()) return Bad(path, root.Mark(), "is no map of keys and values", kExample);
  const YAML::Node named = root["scheme"];
  if (!named || !named.IsScalar()) return Bad(path, root.Mark(), "names no scheme", kExample);
  const std::string& scheme = named.Scalar();
  auto words = layout::WordsOf(scheme);
  if (!words) {
    Status why = std::move(words.error());
    return Bad(path, named.Mark(), why.message(), why.remedy());
  }
  std::string text = scheme;
  char separator = ':';
  std::set<std::string> seen;
  for (const auto& entry : root) {
    if (!entry.first.IsScalar()) return Bad(path, entry.first.Mark(), "a key is no text", kExample);
    const std::string& key = entry.first.Scalar();
    if (!seen.insert(key).second) {
      return Bad(path, entry.first.Mark(), key + " is given twice", "keep one of the lines");
    }
    if (key == "scheme") continue;
    WW_ASSIGN(const std::string word, WordOf(path, scheme, *words, entry.first, entry.second));
    if (word.empty()) continue;
    text.append(1, separator).append(word);
    separator = ',';
  }
  return text;
}

}  // namespace

bool IsSpecFile(const std::string& spec) {
  return spec.ends_with(".yaml") || spec.ends_with(".yml");
}

Result<std::string> SpecFromFile(const std::string& path) {
  WW_ASSIGN(const std::string text,
            ReadFile(path,
                     "a spec that ends in .yaml or .yml is the path of a file; else write it "
                     "as in megatron:tp2,pp2"));
  try {
    return SpecOf(path, YAML::Load(text));
  } catch (const YAML::Exception& error) {
    return Bad(path, error.mark, "is no YAML: " + error.msg, "fix that line");
  }
}

}  // namespace weightwire::cli
