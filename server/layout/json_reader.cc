#include "server/layout/json_reader.h"

#include <cctype>
#include <limits>

namespace weightwire::layout {
namespace {

constexpr size_t kTextBytesMax = size_t{64} << 20;

tl::unexpected<Status> Bad(const std::string& message) {
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest, message);
}

/// nullptr when the member is absent or null.
const Json* Member(const Json& object, const char* key) {
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

/// Whether `word` stands at `at` as a token of its own.
bool IsToken(std::string_view text, size_t at, std::string_view word) {
  const auto part_of_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  return text.substr(at, word.size()) == word && (at == 0 || !part_of_word(text[at - 1])) &&
         (at + word.size() == text.size() || !part_of_word(text[at + word.size()]));
}

/// Python writes what a float can be but JSON cannot, as Nemotron-H's time_step_limit: NaN,
/// Infinity and -Infinity become numbers that are no integers, so that no size is ever read from
/// them. What lies inside texts stays, and all places stay as they were.
std::string WithoutInfinities(std::string_view text) {
  std::string strict(text);
  bool inside = false;  // a text
  for (size_t at = 0; at < text.size(); ++at) {
    if (inside && text[at] == '\\') {
      ++at;
    } else if (text[at] == '"') {
      inside = !inside;
    } else if (!inside && IsToken(text, at, "NaN")) {
      strict.replace(at, 3, "9e9");
    } else if (!inside && IsToken(text, at, "Infinity")) {
      strict.replace(at, 8, "1e308   ");
    }
  }
  return strict;
}

/// The library's account of a failure, which has line and column, in printable characters.
std::string WithoutPrefix(std::string_view what) {
  const size_t end = what.find("] ");
  std::string text(what.substr(end == std::string_view::npos ? 0 : end + 2, 256));
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return text;
}

template <typename T>
Result<T> Required(Result<std::optional<T>> value, const char* key) {
  if (!value) return Fail(std::move(value.error()));
  if (!*value) return Bad(std::string("the field ") + key + " is missing");
  return std::move(**value);
}

}  // namespace

Result<Json> ParseObject(std::string_view text, std::string_view what) {
  if (text.size() > kTextBytesMax) return Bad(std::string(what) + " is over 64 MiB");
  Json json;
  try {
    json = Json::parse(WithoutInfinities(text));
  } catch (const Json::exception& error) {
    return Bad(std::string(what) + " is not JSON: " + WithoutPrefix(error.what()));
  }
  if (!json.is_object()) return Bad(std::string(what) + " is not a JSON object");
  return json;
}

std::optional<int64_t> AsInteger(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > uint64_t{std::numeric_limits<int64_t>::max()}) {
    return std::nullopt;
  }
  return value.get<int64_t>();
}

Result<std::optional<int64_t>> OptionalInteger(const Json& object, const char* key) {
  const Json* member = Member(object, key);
  if (member == nullptr) return std::optional<int64_t>();
  const std::optional<int64_t> value = AsInteger(*member);
  if (!value) return Bad(std::string("the field ") + key + " is not a 64-bit integer");
  return value;
}

Result<std::optional<bool>> OptionalBool(const Json& object, const char* key) {
  const Json* member = Member(object, key);
  if (member == nullptr) return std::optional<bool>();
  if (!member->is_boolean()) return Bad(std::string("the field ") + key + " is not a boolean");
  return std::optional(member->get<bool>());
}

Result<std::optional<std::string>> OptionalString(const Json& object, const char* key) {
  const Json* member = Member(object, key);
  if (member == nullptr) return std::optional<std::string>();
  if (!member->is_string()) return Bad(std::string("the field ") + key + " is not a text");
  return std::optional(member->get<std::string>());
}

Result<int64_t> RequiredInteger(const Json& object, const char* key) {
  return Required(OptionalInteger(object, key), key);
}

Result<std::string> RequiredString(const Json& object, const char* key) {
  return Required(OptionalString(object, key), key);
}

}  // namespace weightwire::layout
