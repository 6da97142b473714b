#include "server/layout/json_reader.h"

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

template <typename T>
Result<T> Required(Result<std::optional<T>> value, const char* key) {
  if (!value) return Fail(std::move(value.error()));
  if (!*value) return Bad(std::string("the field ") + key + " is missing");
  return std::move(**value);
}

}  // namespace

Result<Json> ParseObject(std::string_view text, std::string_view what) {
  if (text.size() > kTextBytesMax) return Bad(std::string(what) + " is over 64 MiB");
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
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
