#include <algorithm>
#include <charconv>
#include <vector>

#include "server/layout/scheme.h"

namespace weightwire::layout {
namespace {

constexpr size_t kTextBytesMax = 4'096;
constexpr int64_t kSizeMax = 65'536;

bool IsLetter(char c) { return (c >= 'a' && c <= 'z') || c == '_'; }
bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsWord(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), IsLetter);
}

Status NotUnderstood(std::string_view text, std::string_view why) {
  std::string message;
  message.append("\"").append(text.substr(0, 128)).append("\" ").append(why);
  return Status(Code::kInvalidArgument, Reason::kUnknownScheme, std::move(message))
      .Remedy("write a parallel spec like megatron:tp2,pp2,first=1");
}

Status AddOption(std::string_view key, std::string_view value, ParallelSpec& spec) {
  const bool printable = std::all_of(value.begin(), value.end(),
                                     [](char c) { return c > ' ' && c < '\x7f' && c != '='; });
  if (!IsWord(key) || value.empty() || !printable) {
    return NotUnderstood(key, "is not a key with a value");
  }
  spec.options.emplace(key, value);
  return OkStatus();
}

Status AddSize(std::string_view key, std::string_view digits, ParallelSpec& spec) {
  int64_t size = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), size);
  if (error != std::errc() || end != digits.data() + digits.size() || !IsWord(key) || size < 1 ||
      size > kSizeMax) {
    return NotUnderstood(std::string(key).append(digits),
                         "is not a word with a size from 1 to 65536");
  }
  spec.sizes.emplace(key, size);
  return OkStatus();
}

Status AddItem(std::string_view item, ParallelSpec& spec) {
  const size_t equals = item.find('=');
  const size_t key_end = equals != std::string_view::npos
                             ? equals
                             : std::find_if(item.begin(), item.end(), IsDigit) - item.begin();
  const std::string key(item.substr(0, key_end));
  if (spec.sizes.contains(key) || spec.options.contains(key)) {
    return NotUnderstood(key, "is given twice");
  }
  if (equals != std::string_view::npos) return AddOption(key, item.substr(equals + 1), spec);
  if (key_end == item.size()) return AddOption(key, "true", spec);
  return AddSize(key, item.substr(key_end), spec);
}

}  // namespace

Result<ParallelSpec> ParseParallelSpec(std::string_view text) {
  if (text.size() > kTextBytesMax) return Fail(NotUnderstood(text, "… is over 4096 bytes"));
  ParallelSpec spec;
  const size_t colon = text.find(':');
  spec.scheme = text.substr(0, colon);
  if (!IsWord(spec.scheme)) return Fail(NotUnderstood(text, "does not begin with a scheme"));
  if (colon == std::string_view::npos) return spec;
  std::string_view rest = text.substr(colon + 1);
  for (bool more = true; more;) {
    const size_t comma = rest.find(',');
    WW_FAIL_IF_ERROR(AddItem(rest.substr(0, comma), spec));
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return spec;
}

std::string ParallelSpec::ToString() const {
  std::map<std::string, std::string> items;
  for (const auto& [key, size] : sizes) items[key] = key + std::to_string(size);
  for (const auto& [key, value] : options) items[key] = value == "true" ? key : key + "=" + value;
  std::string text = scheme;
  char separator = ':';
  for (const auto& [key, item] : items) {
    text.append(1, separator).append(item);
    separator = ',';
  }
  return text;
}

int64_t ParallelSpec::SizeOr(std::string_view key, int64_t fallback) const {
  const auto it = sizes.find(std::string(key));
  return it == sizes.end() ? fallback : it->second;
}

}  // namespace weightwire::layout
