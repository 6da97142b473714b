#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

/// Small arrays with the operations that loaders of checkpoints use. Everything named
/// family_oracle is written from the facts about models and loaders and shares nothing with
/// server/layout or server/plan.
namespace weightwire::family_oracle {

/// A cell that no loader fills.
inline constexpr uint64_t kPadding = uint64_t{1} << 63;

/// Row-major; without dimensions it stands for a tensor that the model lacks.
struct Array {
  std::vector<int64_t> shape;
  std::vector<uint64_t> cells;
  bool f32 = false;  ///< unlike the model's dtype

  explicit operator bool() const { return !shape.empty(); }
  int64_t rows() const { return shape.at(0); }
  /// Cells of one index of dimension 0.
  int64_t Width() const {
    int64_t width = 1;
    for (size_t d = 1; d < shape.size(); ++d) width *= shape[d];
    return width;
  }
};
using Tensors = std::map<std::string, Array>;

inline int64_t Exact(int64_t size, int64_t parts) {
  if (size % parts != 0) throw std::logic_error("a size does not divide");
  return size / parts;
}

/// whole[begin : begin + count]
inline Array Rows(const Array& whole, int64_t begin, int64_t count) {
  if (begin < 0 || begin + count > whole.rows()) throw std::logic_error("rows out of range");
  Array out{whole.shape, {}, whole.f32};
  out.shape[0] = count;
  const int64_t width = whole.Width();
  out.cells.assign(whole.cells.begin() + begin * width,
                   whole.cells.begin() + (begin + count) * width);
  return out;
}

/// torch.chunk(parts, dim=0)[index] of a size that divides; absent stays absent.
inline Array RowChunk(const Array& whole, int64_t parts, int64_t index) {
  if (!whole) return {};
  const int64_t rows = Exact(whole.rows(), parts);
  return Rows(whole, index * rows, rows);
}

/// A matrix's torch.chunk(parts, dim=1)[index].
inline Array ColumnChunk(const Array& whole, int64_t parts, int64_t index) {
  if (!whole) return {};
  const int64_t all = whole.shape.at(1), width = Exact(all, parts);
  Array out{{whole.rows(), width}, {}, whole.f32};
  for (int64_t row = 0; row < whole.rows(); ++row) {
    const auto begin = whole.cells.begin() + row * all + index * width;
    out.cells.insert(out.cells.end(), begin, begin + width);
  }
  return out;
}

/// torch.cat(dim=0)
inline Array Concat(const std::vector<Array>& parts) {
  Array out = parts.at(0);
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].Width() != out.Width()) throw std::logic_error("widths differ");
    out.shape[0] += parts[i].rows();
    out.cells.insert(out.cells.end(), parts[i].cells.begin(), parts[i].cells.end());
  }
  return out;
}

/// torch.stack(dim=0)
inline Array Stack(const std::vector<Array>& parts) {
  Array out = Concat(parts);
  out.shape = parts[0].shape;
  out.shape.insert(out.shape.begin(), static_cast<int64_t>(parts.size()));
  return out;
}

inline Array Reshape(Array array, std::vector<int64_t> shape) {
  array.shape = std::move(shape);
  if (array.rows() * array.Width() != static_cast<int64_t>(array.cells.size())) {
    throw std::logic_error("a reshape changes the size");
  }
  return array;
}

inline Array Transpose(const Array& matrix) {
  const int64_t rows = matrix.rows(), columns = matrix.shape.at(1);
  Array out{{columns, rows}, {}, matrix.f32};
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = 0; row < rows; ++row) {
      out.cells.push_back(matrix.cells[static_cast<size_t>(row * columns + column)]);
    }
  }
  return out;
}

/// array[..., begin::2]
inline Array EveryOther(const Array& array, int64_t begin) {
  Array out{array.shape, {}, array.f32};
  out.shape.back() = Exact(array.shape.back(), 2);
  for (size_t i = static_cast<size_t>(begin); i < array.cells.size(); i += 2) {
    out.cells.push_back(array.cells[i]);
  }
  return out;
}

/// Of every `size` rows the even ones, then the odd ones: view(-1, size / 2, 2, …).transpose(1, 2).
inline Array Unpaired(const Array& array, int64_t size) {
  Array out{array.shape, {}, array.f32};
  const int64_t width = array.Width();
  for (int64_t begin = 0; begin < array.rows(); begin += size) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t row = begin + 2 * (i % Exact(size, 2)) + i / (size / 2);
      const auto at = array.cells.begin() + row * width;
      out.cells.insert(out.cells.end(), at, at + width);
    }
  }
  return out;
}

/// array[index]
inline Array At(const Array& array, int64_t index) {
  Array out = Rows(array, index, 1);
  out.shape.erase(out.shape.begin());
  return out;
}

inline Array PadRows(Array array, int64_t rows) {
  array.cells.resize(static_cast<size_t>(rows * array.Width()), kPadding);
  array.shape[0] = rows;
  return array;
}

/// Adds what the model has: absent arrays are left out.
inline void Put(Tensors& out, const std::string& name, Array array) {
  if (array) out[name] = std::move(array);
}

}  // namespace weightwire::family_oracle
