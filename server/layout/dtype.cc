#include <algorithm>
#include <array>

#include "server/layout/torch_dtype.h"
#include "server/layout/types.h"

namespace weightwire::layout {
namespace {

struct DTypeRow {
  DType dtype;
  int bytes;
  std::string_view name;
  std::string_view torch_name;
};

constexpr std::array<DTypeRow, 15> kRows = {{
    {DType::kBF16, 2, "BF16", "bfloat16"},
    {DType::kF16, 2, "F16", "float16"},
    {DType::kF32, 4, "F32", "float32"},
    {DType::kF64, 8, "F64", "float64"},
    {DType::kI8, 1, "I8", "int8"},
    {DType::kI16, 2, "I16", "int16"},
    {DType::kI32, 4, "I32", "int32"},
    {DType::kI64, 8, "I64", "int64"},
    {DType::kU8, 1, "U8", "uint8"},
    {DType::kBool, 1, "BOOL", "bool"},
    {DType::kF8E4M3, 1, "F8_E4M3", "float8_e4m3fn"},
    {DType::kF8E5M2, 1, "F8_E5M2", "float8_e5m2"},
    {DType::kF8E8M0, 1, "F8_E8M0", "float8_e8m0fnu"},
    {DType::kU16, 2, "U16", "uint16"},
    {DType::kU32, 4, "U32", "uint32"},
}};

const DTypeRow& RowOf(DType dtype) {
  const auto index = static_cast<size_t>(static_cast<int>(dtype)) - 1;
  WW_CHECK(index < kRows.size());
  return kRows[index];
}

}  // namespace

int ElementBytes(DType dtype) { return RowOf(dtype).bytes; }

std::string_view DTypeName(DType dtype) { return RowOf(dtype).name; }

std::optional<DType> DTypeFromName(std::string_view name) {
  for (const DTypeRow& row : kRows) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<DType> DTypeFromNumber(int number) {
  if (number < 1 || number > static_cast<int>(kRows.size())) return std::nullopt;
  return static_cast<DType>(number);
}

bool IsCalibrated(std::string_view tensor) {
  const size_t dot = tensor.rfind('.');
  if (dot == std::string_view::npos) return false;
  return std::ranges::find(kCalibrated, tensor.substr(dot + 1)) != std::end(kCalibrated);
}

bool CanStoreScales(ScaleRule rule, DType from, DType scales) {
  const bool byte = scales == DType::kF8E8M0 || scales == DType::kU8;
  switch (rule) {
    case ScaleRule::kQuotient:
    case ScaleRule::kOwnQuotient:
      return scales == DType::kF32;
    case ScaleRule::kPowerOfTwo:
      return byte || scales == DType::kF32;
    case ScaleRule::kOwnKind:
    case ScaleRule::kInt4:
      return scales == from;
    case ScaleRule::kPowerOfTwoRounded:
    case ScaleRule::kMxFp4:
    case ScaleRule::kMxFp4Rounded:
      return byte;
    case ScaleRule::kNvFp4:
    case ScaleRule::kNvFp4Modelopt:
      return scales == DType::kF8E4M3;
  }
  return false;
}

std::optional<DType> DTypeFromTorchName(std::string_view name) {
  for (const DTypeRow& row : kRows) {
    if (row.torch_name == name) return row.dtype;
  }
  return std::nullopt;
}

}  // namespace weightwire::layout
