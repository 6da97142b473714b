#include "server/layout/families/block_scales.h"

namespace weightwire::layout {
namespace {

/// A side that no block comes near; products with any size fit int64.
constexpr int64_t kBlockMax = 65'536;

Status Undescribed(std::string_view what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "quantization_config " + std::string(what))
      .Remedy(
          "described is quant_method \"fp8\" with fmt \"e4m3\", activation_scheme \"dynamic\" and "
          "a "
          "weight_block_size of two sizes; leave quantization_config out if the weights are not "
          "quantized, or send explicit layouts");
}

/// Refuses a text field that is there and is not `wanted`.
Status CheckText(const Json& json, const char* key, std::string_view wanted) {
  WW_ASSIGN_OR_STATUS(const std::optional<std::string> given, OptionalString(json, key));
  if (!given || *given == wanted) return OkStatus();
  return Undescribed("has " + std::string(key) + " \"" + given->substr(0, 64) + "\"");
}

Status AddSkipped(const Json& json, const char* key, BlockScales& scales) {
  const auto list = json.find(key);
  if (list == json.end() || list->is_null()) return OkStatus();
  bool fits = list->is_array();
  if (fits) {
    for (const Json& entry : *list) {
      fits = fits && entry.is_string() && !entry.get_ref<const std::string&>().empty();
      if (fits) scales.skipped.insert(entry.get<std::string>());
    }
  }
  return fits ? OkStatus() : Undescribed(std::string("has a ") + key + " that lists no modules");
}

Status ReadBlock(const Json& json, BlockScales& scales) {
  const auto block = json.find("weight_block_size");
  if (block == json.end() || block->is_null()) {
    return Undescribed("has no weight_block_size: scales of whole tensors are not described");
  }
  const bool two = block->is_array() && block->size() == 2;
  const int64_t rows = two ? AsInteger(block->at(0)).value_or(0) : 0;
  const int64_t columns = two ? AsInteger(block->at(1)).value_or(0) : 0;
  if (rows < 1 || columns < 1 || rows > kBlockMax || columns > kBlockMax) {
    return Undescribed("has a weight_block_size that is no pair of sizes");
  }
  scales.rows = rows;
  scales.columns = columns;
  return OkStatus();
}

}  // namespace

bool BlockScales::Skips(std::string_view tensor) const {
  if (skipped.empty()) return false;
  for (size_t begin = 0; begin != std::string_view::npos;) {
    for (size_t end = begin; end != std::string_view::npos;) {
      end = tensor.find('.', end + 1);
      if (skipped.contains(
              tensor.substr(begin, end == std::string_view::npos ? end : end - begin))) {
        return true;
      }
    }
    begin = tensor.find('.', begin);
    if (begin != std::string_view::npos) ++begin;
  }
  return false;
}

Result<std::optional<BlockScales>> ReadBlockScales(const Json& json) {
  const auto it = json.find("quantization_config");
  if (it == json.end() || it->is_null()) return std::optional<BlockScales>();
  if (!it->is_object()) return Fail(Undescribed("is no object"));
  WW_ASSIGN(const std::optional<std::string> method, OptionalString(*it, "quant_method"));
  if (!method) return Fail(Undescribed("has no quant_method"));
  WW_FAIL_IF_ERROR(CheckText(*it, "quant_method", "fp8"));
  WW_FAIL_IF_ERROR(CheckText(*it, "fmt", "e4m3"));
  WW_FAIL_IF_ERROR(CheckText(*it, "activation_scheme", "dynamic"));
  BlockScales scales;
  WW_FAIL_IF_ERROR(ReadBlock(*it, scales));
  WW_FAIL_IF_ERROR(AddSkipped(*it, "modules_to_not_convert", scales));
  WW_FAIL_IF_ERROR(AddSkipped(*it, "ignored_layers", scales));
  return scales;
}

}  // namespace weightwire::layout
