#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "server/layout/types.h"

/// Reads checkpoints and cuts them element by element, as slowly and plainly as can be: the oracle
/// that tests compare with. Throws std::runtime_error when a file is not as it should be.
namespace weightwire::testing {

struct StoredTensor {
  std::string dtype;  ///< safetensors' spelling
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;
  friend bool operator==(const StoredTensor&, const StoredTensor&) = default;
};
using TensorFile = std::map<std::string, StoredTensor>;

/// The project's root, from WEIGHTWIRE_SOURCE_DIR.
inline std::string SourceDir() {
  const char* dir = std::getenv("WEIGHTWIRE_SOURCE_DIR");
  if (dir == nullptr) throw std::runtime_error("WEIGHTWIRE_SOURCE_DIR is not set");
  return dir;
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline TensorFile ReadSafetensors(const std::string& path) {
  const std::string text = ReadText(path);
  uint64_t header_bytes = 0;
  if (text.size() < 8) throw std::runtime_error(path + " is too short");
  std::memcpy(&header_bytes, text.data(), 8);
  if (header_bytes > text.size() - 8) throw std::runtime_error(path + " has a bad header");
  const auto header = nlohmann::json::parse(text.substr(8, header_bytes));
  const std::string payload = text.substr(8 + header_bytes);
  TensorFile tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry.at("data_offsets").at(0).get<size_t>();
    const auto end = entry.at("data_offsets").at(1).get<size_t>();
    if (begin > end || end > payload.size()) throw std::runtime_error(path + ": bad offsets");
    tensors[name] = {entry.at("dtype"),
                     entry.at("shape"),
                     {payload.begin() + static_cast<std::ptrdiff_t>(begin),
                      payload.begin() + static_cast<std::ptrdiff_t>(end)}};
  }
  return tensors;
}

inline int64_t CountElements(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

/// Calls visit(element of the canonical tensor, element of the local storage), both row-major
/// indices, for every element of `piece`.
inline void ForEachElement(const layout::Piece& piece, const std::vector<int64_t>& canonical_shape,
                           const std::function<void(int64_t, int64_t)>& visit) {
  const int64_t count = CountElements(piece.box.extent);
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t canonical = 0;
    int64_t local = piece.local_offset;
    int64_t canonical_stride = 1;
    for (size_t d = canonical_shape.size(); d-- > 0;) {
      const int64_t index = rest % piece.box.extent[d];
      rest /= piece.box.extent[d];
      canonical += (piece.box.begin[d] + index) * canonical_stride;
      canonical_stride *= canonical_shape[d];
      local += index * piece.local_stride[d];
    }
    visit(canonical, local);
  }
}

}  // namespace weightwire::testing
