#include "server/layout/families/block_scales.h"

#include <algorithm>
#include <cctype>

#include "server/layout/schemes/filter.h"

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
          "weight_block_size of two sizes. Run the engine in bf16, without quantization_config; or "
          "push a checkpoint that is quantized already (wwctl push) to an engine with explicit "
          "layouts");
}

/// Fields that are described. A list of `wanted` values: any other is refused; an empty one: the
/// field is read below.
struct Field {
  std::string_view key;
  std::vector<Json> wanted = {};
};

/// Every field that is there, and not null, is one that is understood: what is not read here may
/// change what the bytes mean, as scale_fmt does.
Status CheckFields(const Json& json) {
  const std::vector<Field> fields = {
      {"quant_method"},
      {"fmt", {"e4m3", "float8_e4m3fn"}},
      {"activation_scheme", {"dynamic"}},
      {"scale_fmt", {"float"}},
      {"dequantize", {false}},
      {"weight_block_size"},
      {"modules_to_not_convert"},
      {"ignored_layers"},
  };
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) continue;
    const auto field = std::ranges::find(fields, key, &Field::key);
    if (field == fields.end()) {
      return Undescribed("has the field " + key.substr(0, 64) + ", which is not understood");
    }
    if (field->wanted.empty() || std::ranges::find(field->wanted, value) != field->wanted.end()) {
      continue;
    }
    return Undescribed("has " + key + " " + value.dump().substr(0, 64));
  }
  return OkStatus();
}

bool IsNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
}

/// '*' stands for whole parts of a name, after a part that is written out: there transformers,
/// which reads a regular expression, and readers of globs agree. Other patterns are read
/// differently.
Status CheckPattern(const std::string& key, const std::string& entry) {
  for (size_t at = 0; at < entry.size(); ++at) {
    const bool whole = entry[at] == '*' && at > 1 && entry[at - 1] == '.' &&
                       (at + 1 == entry.size() || entry[at + 1] == '.');
    if (whole || IsNameCharacter(entry[at])) continue;
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "quantization_config's " + key + " has \"" + entry.substr(0, 64) +
                      "\": loaders of fp8 read such a pattern differently, or not at all")
        .Remedy(
            "write whole parts of names, as in lm_head, mlp.gate or model.layers.0.self_attn; '*' "
            "between dots stands for any");
  }
  return OkStatus();
}

Status AddSkipped(const Json& json, const char* key, BlockScales& scales) {
  const auto list = json.find(key);
  if (list == json.end() || list->is_null()) return OkStatus();
  const auto lists_no_modules = [key] {
    return Undescribed(std::string("has a ") + key + " that lists no modules");
  };
  if (!list->is_array()) return lists_no_modules();
  for (const Json& entry : *list) {
    if (!entry.is_string()) return lists_no_modules();
    const auto& name = entry.get_ref<const std::string&>();
    if (name.find_first_not_of('.') == std::string::npos) return lists_no_modules();
    WW_RETURN_IF_ERROR(CheckPattern(key, name));
    if (name.find('*') == std::string::npos) {
      scales.skipped.insert(name);
    } else {
      scales.patterns.push_back(name);
    }
  }
  return OkStatus();
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
  bool found = false;
  ForEachMatch(tensor, [&found](const std::string&) { found = true; });
  return found;
}

void BlockScales::ForEachMatch(std::string_view tensor,
                               const std::function<void(const std::string&)>& visit) const {
  for (size_t begin = 0; begin != std::string_view::npos && !skipped.empty();) {
    for (size_t end = begin; end != std::string_view::npos;) {
      end = tensor.find('.', end + 1);
      const auto entry =
          skipped.find(tensor.substr(begin, end == std::string_view::npos ? end : end - begin));
      if (entry != skipped.end()) visit(*entry);
    }
    begin = tensor.find('.', begin);
    if (begin != std::string_view::npos) ++begin;
  }
  for (const std::string& pattern : patterns) {
    if (GlobMatches(pattern, tensor) || GlobMatches(pattern + ".*", tensor)) visit(pattern);
  }
}

Result<std::optional<BlockScales>> ReadBlockScales(const Json& json) {
  if (const auto old = json.find("compression_config"); old != json.end() && !old->is_null()) {
    return Fail(Undescribed("stands under compression_config, its old name"));
  }
  const auto it = json.find("quantization_config");
  if (it == json.end() || it->is_null()) return std::optional<BlockScales>();
  if (!it->is_object()) return Fail(Undescribed("is no object"));
  WW_ASSIGN(const std::optional<std::string> method, OptionalString(*it, "quant_method"));
  if (!method) return Fail(Undescribed("has no quant_method"));
  if (*method != "fp8") {
    return Fail(Undescribed("has quant_method \"" + method->substr(0, 64) + "\""));
  }
  WW_FAIL_IF_ERROR(CheckFields(*it));
  BlockScales scales;
  WW_FAIL_IF_ERROR(ReadBlock(*it, scales));
  WW_FAIL_IF_ERROR(AddSkipped(*it, "modules_to_not_convert", scales));
  WW_FAIL_IF_ERROR(AddSkipped(*it, "ignored_layers", scales));
  return scales;
}

}  // namespace weightwire::layout
