#include "client/cli/observed.h"

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "client/cli/offline.h"
#include "server/layout/torch_dtype.h"

namespace weightwire::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // safetensors' own limit

Status Bad(const std::string& path, const std::string& what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "'" + path + "': " + what)
      .Remedy("--observed takes {\"name\": [\"BF16\", [2, 3]], …} or a safetensors file");
}

/// The JSON text of a safetensors file's header; nullopt for a file that does not begin with one.
std::optional<std::string> SafetensorsHeader(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  unsigned char size_bytes[8];
  if (!file.read(reinterpret_cast<char*>(size_bytes), sizeof size_bytes)) return std::nullopt;
  uint64_t size = 0;
  for (int i = 7; i >= 0; --i) size = size << 8 | size_bytes[i];
  if (size == 0 || size > kHeaderBytesMax || file.peek() != '{') return std::nullopt;
  std::string header(size, '\0');
  if (!file.read(header.data(), static_cast<std::streamsize>(size))) return std::nullopt;
  return header;
}

std::optional<layout::DType> DTypeOf(const Json& value) {
  if (!value.is_string()) return std::nullopt;
  std::string name = value.get<std::string>();
  if (auto known = layout::DTypeFromName(name)) return known;
  if (name.rfind("torch.", 0) == 0) name.erase(0, 6);
  return layout::DTypeFromTorchName(name);
}

std::optional<layout::Shape> ShapeOf(const Json& value) {
  if (!value.is_array()) return std::nullopt;
  layout::Shape shape;
  for (const Json& size : value) {
    if (!size.is_number_integer() || size < 0 || size > INT64_MAX) return std::nullopt;
    shape.push_back(size.get<int64_t>());
  }
  return shape;
}

}  // namespace

Result<std::vector<layout::ObservedTensor>> ReadObserved(const std::string& path) {
  std::optional<std::string> text = SafetensorsHeader(path);
  if (!text) {
    WW_ASSIGN(text, ReadFile(path, "--observed takes the path of a file"));
  }
  const Json json = Json::parse(*text, nullptr, false);
  if (!json.is_object()) return Fail(Bad(path, "is neither a JSON object nor a safetensors file"));
  std::vector<layout::ObservedTensor> observed;
  for (const auto& [name, entry] : json.items()) {
    if (name == "__metadata__") continue;
    std::optional<layout::DType> dtype;
    std::optional<layout::Shape> shape;
    if (entry.is_array() && entry.size() == 2) {
      dtype = DTypeOf(entry[0]);
      shape = ShapeOf(entry[1]);
    } else if (entry.is_object() && entry.contains("dtype") && entry.contains("shape")) {
      dtype = DTypeOf(entry["dtype"]);
      shape = ShapeOf(entry["shape"]);
    }
    if (!dtype || !shape) {
      return Fail(
          Bad(path, "'" + name + "' has no dtype and shape that are understood").AtTensor(name));
    }
    observed.push_back({name, *dtype, std::move(*shape)});
  }
  return observed;
}

}  // namespace weightwire::cli
