#include "server/layout/families/weight_format.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <regex>

#include "server/layout/blocks.h"
#include "server/layout/schemes/filter.h"

namespace weightwire::layout {

struct WeightFormat::Expression {
  explicit Expression(const std::string& text) : regex(text) {}
  std::regex regex;
};

namespace {

constexpr std::string_view kShortSuffix = kScaleSuffixes[1];
constexpr std::string_view kInputScale = kCalibrated[0];
constexpr std::string_view kInputGlobalScale = kCalibrated[1];
constexpr IgnoreRule kNamesAndExpressions = IgnoreRule::kNamesAndExpressions;

/// All that is described. Those with a size of 0 have theirs from the weight; fp8-block is also
/// read with other blocks.
constexpr int64_t kAll = 0;
const std::array<WeightFormat, 17>& Formats() {
  static const std::array<WeightFormat, 17> formats = {{
      {"fp8-block", 128, 128},
      {"fp8-block-ue8m0", 128, 128, ScaleRule::kPowerOfTwo},
      {"mxfp8", 1, 32, ScaleRule::kPowerOfTwo, DType::kU8},
      {"mxfp8-modelopt", 1, 32, ScaleRule::kPowerOfTwo, DType::kU8, kShortSuffix,
       IgnoreRule::kGlobs},
      {"fp8-modelopt", kAll, kAll, ScaleRule::kOwnQuotient, DType::kF32, kShortSuffix,
       IgnoreRule::kGlobs, DType::kF8E4M3, 1, kInputScale},
      {"fp8-channel-modelopt", 1, kAll, ScaleRule::kQuotient, DType::kF32, kShortSuffix,
       IgnoreRule::kGlobs},
      {"nvfp4-modelopt", 1, 16, ScaleRule::kNvFp4Modelopt, DType::kF8E4M3, kShortSuffix,
       IgnoreRule::kGlobs, DType::kU8, 2, kInputScale},
      {"nvfp4-w4a16-modelopt", 1, 16, ScaleRule::kNvFp4Modelopt, DType::kF8E4M3, kShortSuffix,
       IgnoreRule::kGlobs, DType::kU8, 2},
      {"fp8-tensor", kAll, kAll, ScaleRule::kOwnKind, std::nullopt, kShortSuffix,
       kNamesAndExpressions},
      {"fp8-channel", 1, kAll, ScaleRule::kOwnKind, std::nullopt, kShortSuffix,
       kNamesAndExpressions},
      {"fp8-block-compressed-tensors", 128, 128, ScaleRule::kOwnKind, std::nullopt, kShortSuffix,
       kNamesAndExpressions},
      {"mxfp8-compressed-tensors", 1, 32, ScaleRule::kPowerOfTwoRounded, DType::kU8, kShortSuffix,
       kNamesAndExpressions},
      {"mxfp4-compressed-tensors", 1, 32, ScaleRule::kMxFp4Rounded, DType::kU8, kShortSuffix,
       kNamesAndExpressions, DType::kU8, 2},
      {"nvfp4-compressed-tensors", 1, 16, ScaleRule::kNvFp4, DType::kF8E4M3, kShortSuffix,
       kNamesAndExpressions, DType::kU8, 2},
      {"int4-32-compressed-tensors", 1, 32, ScaleRule::kInt4, std::nullopt, kShortSuffix,
       kNamesAndExpressions, DType::kI32, 8},
      {"int4-128-compressed-tensors", 1, 128, ScaleRule::kInt4, std::nullopt, kShortSuffix,
       kNamesAndExpressions, DType::kI32, 8},
      {"mxfp4-gpt-oss", 1, 32, ScaleRule::kMxFp4, DType::kU8, kFusedScales, IgnoreRule::kParts,
       DType::kU8, 2},
  }};
  return formats;
}

WeightFormat Format(std::string_view name) {
  const auto found = std::ranges::find(Formats(), name, &WeightFormat::name);
  WW_CHECK(found != Formats().end());
  return *found;
}

Status Undescribed(std::string_view what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "quantization_config " + std::string(what))
      .Remedy(
          "described are quant_method \"fp8\" (fmt \"e4m3\", activation_scheme \"dynamic\", a "
          "weight_block_size of two sizes, scale_fmt \"ue8m0\" or none), \"mxfp8\", \"mxfp4\" of "
          "gpt_oss, compressed-tensors' weights in fp8, MXFP8, MXFP4, NVFP4 and groups of INT4, "
          "and modelopt's MXFP8, FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and W4A16_NVFP4. Run the "
          "engine in bf16, "
          "without quantization_config; or push a checkpoint that is quantized already (wwctl "
          "push) "
          "to an engine with explicit layouts");
}

std::string Shown(const Json& value) { return value.dump().substr(0, 64); }

/// Fields that are described. A list of `wanted` values: any other is refused; an empty one: the
/// field is read elsewhere, or says nothing of the weights' bytes.
struct Field {
  std::string_view key;
  std::vector<Json> wanted = {};
};

/// Every field that is there, and not null, is one that is understood: what is not read here may
/// change what the bytes mean. `where`: in front of names of fields.
Status CheckFields(const Json& json, const std::string& where, const std::vector<Field>& fields) {
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) continue;
    const auto field = std::ranges::find(fields, key, &Field::key);
    const std::string name = where + key.substr(0, 64);
    if (field == fields.end()) {
      return Undescribed("has the field " + name + ", which is not understood");
    }
    if (field->wanted.empty() || std::ranges::find(field->wanted, value) != field->wanted.end()) {
      continue;
    }
    return Undescribed("has " + name + " " + Shown(value));
  }
  return OkStatus();
}

bool IsNameCharacter(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '-' || c == '.';
}

Status BadPattern(const std::string& key, const std::string& entry, const std::string& why,
                  const std::string& remedy) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "quantization_config's " + key + " has \"" + entry.substr(0, 64) + "\": " + why)
      .Remedy(remedy);
}

/// '*' stands for whole parts of a name, after a part that is written out: there transformers,
/// which reads a regular expression, and readers of globs agree. Other patterns are read
/// differently.
Status CheckParts(const std::string& key, const std::string& entry) {
  for (size_t at = 0; at < entry.size(); ++at) {
    const bool whole = entry[at] == '*' && at > 1 && entry[at - 1] == '.' &&
                       (at + 1 == entry.size() || entry[at + 1] == '.');
    if (whole || IsNameCharacter(entry[at])) continue;
    return BadPattern(
        key, entry, "loaders of fp8 read such a pattern differently, or not at all",
        "write whole parts of names, as in lm_head, mlp.gate or model.layers.0.self_attn; '*' "
        "between dots stands for any");
  }
  return OkStatus();
}

Status CheckPlain(const std::string& key, const std::string& entry, std::string_view also,
                  const std::string& remedy) {
  const bool plain = std::ranges::all_of(entry, [also](char c) {
    return IsNameCharacter(c) || also.find(c) != std::string_view::npos;
  });
  return plain ? OkStatus() : BadPattern(key, entry, "it can be the name of no module", remedy);
}

/// Expressions that Python and std::regex read alike, and whose search takes few steps whatever the
/// name: no group is repeated, and little else is. nullptr for all others.
std::shared_ptr<const WeightFormat::Expression> ExpressionOf(std::string_view text) {
  constexpr std::string_view kAlso = "\\*+?()|^$[]";
  constexpr int kRepeatedMax = 4;
  int repeated = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (!IsNameCharacter(text[i]) && kAlso.find(text[i]) == std::string_view::npos) return nullptr;
    if (text[i] == '(' && next == '?') return nullptr;
    if (text[i] == ')' && (next == '*' || next == '+')) return nullptr;
    if (text[i] == '\\') {
      if (std::string_view(".dw-_").find(next) == std::string_view::npos) return nullptr;
      ++i;
    } else if ((text[i] == '*' || text[i] == '+') && ++repeated > kRepeatedMax) {
      return nullptr;
    }
  }
  try {
    return std::make_shared<WeightFormat::Expression>(std::string(text));
  } catch (const std::regex_error&) {
    return nullptr;
  }
}

Status AddEntry(const std::string& key, const std::string& entry, WeightFormat& format) {
  constexpr std::string_view kMark = "re:";
  switch (format.ignore) {
    case IgnoreRule::kParts:
      WW_RETURN_IF_ERROR(CheckParts(key, entry));
      break;
    case IgnoreRule::kGlobs:
      WW_RETURN_IF_ERROR(CheckPlain(
          key, entry, "*?", "write whole names of modules, with * and ? for any characters"));
      break;
    case IgnoreRule::kNamesAndExpressions:
      if (!entry.starts_with(kMark)) {
        WW_RETURN_IF_ERROR(CheckPlain(
            key, entry, "", "write whole names of modules, or re: and a regular expression"));
        break;
      }
      auto expression = ExpressionOf(entry.substr(kMark.size()));
      if (expression == nullptr) {
        return BadPattern(
            key, entry, "no expression that is read here",
            "write it with names, . \\. \\d [] (|) ? ^ $ and at most four * or +, none of "
            "them behind a group");
      }
      format.expressions.push_back(std::move(expression));
      format.patterns.push_back(entry);
      return OkStatus();
  }
  if (entry.find_first_of("*?") == std::string::npos) {
    format.skipped.insert(entry);
  } else {
    format.patterns.push_back(entry);
  }
  return OkStatus();
}

Status AddSkipped(const Json& json, const char* key, WeightFormat& format) {
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
    WW_RETURN_IF_ERROR(AddEntry(key, name, format));
  }
  return OkStatus();
}

Status ReadBlock(const Json& json, const char* key, WeightFormat& format) {
  const auto block = json.find(key);
  if (block == json.end() || block->is_null()) {
    return Undescribed(std::string("has no ") + key +
                       ": scales of whole tensors are not described");
  }
  const bool two = block->is_array() && block->size() == 2;
  const int64_t rows = two ? AsInteger(block->at(0)).value_or(0) : 0;
  const int64_t columns = two ? AsInteger(block->at(1)).value_or(0) : 0;
  if (rows < 1 || columns < 1 || rows > kBlockMax || columns > kBlockMax) {
    return Undescribed(std::string("has a ") + key + " that is no pair of sizes");
  }
  format.rows = rows;
  format.columns = columns;
  return OkStatus();
}

/// DeepSeek's, Qwen's and transformers' own.
Result<WeightFormat> ReadFp8(const Json& json) {
  WW_FAIL_IF_ERROR(CheckFields(json, "",
                               {{"quant_method"},
                                {"fmt", {"e4m3", "float8_e4m3fn"}},
                                {"activation_scheme", {"dynamic"}},
                                {"scale_fmt", {"float", "ue8m0"}},
                                {"dequantize", {false}},
                                {"weight_block_size"},
                                {"modules_to_not_convert"},
                                {"ignored_layers"}}));
  WeightFormat format =
      Format(json.value("scale_fmt", Json()) == "ue8m0" ? "fp8-block-ue8m0" : "fp8-block");
  WW_FAIL_IF_ERROR(ReadBlock(json, "weight_block_size", format));
  return format;
}

/// SGLang's.
Result<WeightFormat> ReadMxFp8(const Json& json) {
  WW_FAIL_IF_ERROR(CheckFields(json, "",
                               {{"quant_method"},
                                {"fmt", {"e4m3", "float8_e4m3fn"}},
                                {"activation_scheme", {"dynamic"}},
                                {"scale_fmt", {"ue8m0"}},
                                {"weight_block_size", {Json{1, 32}}},
                                {"modules_to_not_convert"},
                                {"ignored_layers"}}));
  return Format("mxfp8");
}

constexpr int64_t kFourBitGroupMax = 256;  // kernels/four_bit.h

/// Of four bits. `stored`: the format in which compressed-tensors stores them.
Result<WeightFormat> ReadFourBits(const Json& weights, std::string_view type,
                                  const std::string& stored) {
  const std::string where = "config_groups.weights.";
  const bool integers = type == "int";
  const bool nv = stored == "nvfp4-pack-quantized";
  const std::string_view wanted = integers ? "pack-quantized" : "mxfp4-pack-quantized";
  if (stored != wanted && (integers || !nv)) {
    return Fail(Undescribed("has format \"" + stored.substr(0, 64) +
                            "\" for weights of 4 bits, type " + std::string(type)));
  }
  const char* scale = nv ? "torch.float8_e4m3fn" : "torch.uint8";
  WW_FAIL_IF_ERROR(CheckFields(weights, where,
                               {{"num_bits"},
                                {"type"},
                                {"strategy", {nv ? "tensor_group" : "group"}},
                                {"symmetric", {true}},
                                {"dynamic", {false}},
                                {"group_size"},
                                {"scale_dtype", {integers ? "" : scale}},
                                {"zp_dtype"},
                                {"observer"},
                                {"observer_kwargs"}}));
  WeightFormat format = Format(integers ? "int4-32-compressed-tensors"
                               : nv     ? "nvfp4-compressed-tensors"
                                        : "mxfp4-compressed-tensors");
  WW_ASSIGN(const std::optional<int64_t> size, OptionalInteger(weights, "group_size"));
  const int64_t group = size.value_or(0);
  const bool known =
      integers ? group >= format.packed && group <= kFourBitGroupMax && group % format.packed == 0
               : group == format.columns;
  if (!known) {
    return Fail(Undescribed("has " + where + "group_size " + std::to_string(group) + "; " +
                            (integers ? "multiples of 8 up to 256 are described"
                                      : std::to_string(format.columns) + " is described")));
  }
  if (weights.value("strategy", Json()).is_null()) {
    return Fail(Undescribed("has no " + where + "strategy"));
  }
  format.columns = group;
  return format;
}

/// What compressed-tensors says of weights: how many bits in which groups, stored in which format.
Result<WeightFormat> ReadScheme(const Json& weights, const std::string& stored) {
  const std::string where = "config_groups.weights.";
  WW_ASSIGN(const std::optional<int64_t> bits, OptionalInteger(weights, "num_bits"));
  WW_ASSIGN(const std::optional<std::string> type, OptionalString(weights, "type"));
  WW_ASSIGN(const std::optional<std::string> strategy, OptionalString(weights, "strategy"));
  if (bits == 4 && (!type || type == "int" || type == "float")) {
    return ReadFourBits(weights, type.value_or("int"), stored);
  }
  if (bits != 8 || type != "float") {
    return Fail(Undescribed("has weights of " + std::to_string(bits.value_or(0)) + " bits, type " +
                            type.value_or("int").substr(0, 64) +
                            ", which are not made on the way"));
  }
  WW_FAIL_IF_ERROR(CheckFields(weights, where,
                               {{"num_bits"},
                                {"type"},
                                {"strategy", {"tensor", "channel", "block", "group"}},
                                {"symmetric", {true}},
                                {"dynamic", {false}},
                                {"group_size"},
                                {"block_structure"},
                                {"scale_dtype", {"torch.uint8"}},
                                {"zp_dtype"},  // there are no zero points
                                {"observer"},
                                {"observer_kwargs"}}));
  const bool bytes = !weights.value("scale_dtype", Json()).is_null();
  if (strategy == "group") {
    WW_ASSIGN(const std::optional<int64_t> size, OptionalInteger(weights, "group_size"));
    if (!bytes || size != 32) {
      return Fail(Undescribed("has groups of " + std::to_string(size.value_or(0)) +
                              (bytes ? "" : " with scales that are no E8M0 bytes")));
    }
    return Format("mxfp8-compressed-tensors");
  }
  if (bytes) return Fail(Undescribed("has " + where + "scale_dtype \"torch.uint8\""));
  if (strategy == "tensor") return Format("fp8-tensor");
  if (strategy == "channel") return Format("fp8-channel");
  if (strategy != "block") return Fail(Undescribed("has no " + where + "strategy"));
  WeightFormat format = Format("fp8-block-compressed-tensors");
  WW_FAIL_IF_ERROR(ReadBlock(weights, "block_structure", format));
  return format;
}

/// Whether nothing is said: null, or no entry.
bool IsSilent(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found == json.end() || found->is_null() || (found->is_structured() && found->empty());
}

/// One scale in fp8, symmetric, for all of a tensor: what is calibrated beyond that has other
/// shapes, or zero points.
Status CheckCalibrated(const Json& scheme, const std::string& where) {
  WW_RETURN_IF_ERROR(CheckFields(scheme, where + ".",
                                 {{"num_bits", {8}},
                                  {"type", {"float"}},
                                  {"strategy", {"tensor"}},
                                  {"symmetric", {true}},
                                  {"dynamic", {false}},
                                  {"scale_dtype"},
                                  {"zp_dtype"},
                                  {"observer"},
                                  {"observer_kwargs"}}));
  for (const char* key : {"num_bits", "type", "strategy"}) {
    if (IsSilent(scheme, key)) return Undescribed("has no " + where + "." + key);
  }
  return IsSilent(scheme, "scale_dtype") ? OkStatus()
                                         : Undescribed("has a " + where + ".scale_dtype");
}

/// Sets `format.input` where activations have calibrated scales.
Status ReadActivations(const Json& group, WeightFormat& format) {
  if (!IsSilent(group, "output_activations")) {
    return Undescribed("has output_activations, whose scales are not described");
  }
  const auto found = group.find("input_activations");
  if (found == group.end() || found->is_null()) return OkStatus();
  const Json dynamic = found->is_object() ? found->value("dynamic", Json()) : Json();
  if (dynamic == true) return OkStatus();
  if (dynamic == "local") {  // scales of groups, beside one of all that is calibrated
    if (format.rule != ScaleRule::kNvFp4 || found->value("num_bits", Json()) != 4 ||
        found->value("strategy", Json()) != "tensor_group" ||
        found->value("symmetric", Json(true)) != true) {
      return Undescribed("has input_activations with dynamic \"local\" that are not NVFP4's");
    }
    format.input = kInputGlobalScale;
    return OkStatus();
  }
  if (!found->is_object() || format.packed > 1 || format.rule != ScaleRule::kOwnKind) {
    return Undescribed(
        "has input_activations that are not dynamic, of another kind than fp8 of weights in fp8");
  }
  format.input = kInputScale;
  return CheckCalibrated(*found, "config_groups.input_activations");
}

constexpr const char* kMixed = "mixed-precision";  // each group says its own

/// Those in which a weight of 8 bits float is stored as codes with a scale beside it, and those
/// that pack four bits. Others leave it as it was ("dense").
const std::vector<Json> kWholeByteFormats = {"float-quantized", "naive-quantized",
                                             "mxfp8-quantized"};
std::vector<Json> StoredFormats() {
  std::vector<Json> formats = kWholeByteFormats;
  for (const char* packed : {"pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized"}) {
    formats.emplace_back(packed);
  }
  return formats;
}

Result<WeightFormat> ReadCompressedTensors(const Json& json) {
  std::vector<Json> formats = StoredFormats();
  formats.emplace_back(kMixed);
  WW_FAIL_IF_ERROR(CheckFields(json, "",
                               {{"quant_method"},
                                {"config_groups"},
                                {"format", formats},
                                {"global_compression_ratio"},
                                {"ignore"},
                                {"quantization_status", {"compressed", "frozen"}},
                                {"kv_cache_scheme"},
                                {"sparsity_config"},
                                {"transform_config"},
                                {"version"}}));
  for (const char* key : {"sparsity_config", "transform_config"}) {
    if (!IsSilent(json, key)) {
      return Fail(Undescribed(std::string("has a ") + key + ", which is not described"));
    }
  }
  const auto groups = json.find("config_groups");
  if (groups == json.end() || !groups->is_object() || groups->size() != 1) {
    return Fail(Undescribed("has no config_groups, or more than one group"));
  }
  const Json& group = groups->front();
  if (!group.is_object() || group.value("targets", Json()) != Json{"Linear"}) {
    return Fail(Undescribed("has a config group whose targets are not [\"Linear\"]"));
  }
  WW_FAIL_IF_ERROR(CheckFields(group, "config_groups.",
                               {{"targets"},
                                {"weights"},
                                {"input_activations"},
                                {"output_activations"},
                                {"format", StoredFormats()}}));
  const Json outer = json.value("format", Json());
  const Json inner = group.value("format", Json());
  if (outer == kMixed && inner.is_null()) {
    return Fail(Undescribed("has format \"mixed-precision\" and a config group that names none"));
  }
  if (outer.is_string() && inner.is_string() && outer != kMixed && outer != inner) {
    return Fail(Undescribed("has format " + Shown(outer) + " and a config group that names " +
                            Shown(inner)));
  }
  const Json stored = inner.is_null() ? outer : inner;
  const auto weights = group.find("weights");
  if (weights == group.end() || !weights->is_object()) {
    return Fail(Undescribed("has a config group without weights"));
  }
  WW_ASSIGN(WeightFormat format,
            ReadScheme(*weights, stored.is_string() ? stored.get<std::string>() : std::string()));
  const bool whole = std::ranges::find(kWholeByteFormats, stored) != kWholeByteFormats.end();
  if (format.packed == 1 && !stored.is_null() && !whole) {
    return Fail(Undescribed("has format " + Shown(stored) + " for weights of 8 bits"));
  }
  WW_FAIL_IF_ERROR(ReadActivations(group, format));
  if (!IsSilent(json, "kv_cache_scheme")) {
    if (!json["kv_cache_scheme"].is_object()) {
      return Fail(Undescribed("has a kv_cache_scheme that is no object"));
    }
    WW_FAIL_IF_ERROR(CheckCalibrated(json["kv_cache_scheme"], "kv_cache_scheme"));
    format.kv = KvScales::kAttention;
  }
  return format;
}

/// gpt-oss'.
Result<WeightFormat> ReadMxFp4(const Json& json) {
  WW_FAIL_IF_ERROR(CheckFields(
      json, "", {{"quant_method"}, {"dequantize", {false}}, {"modules_to_not_convert"}}));
  return Format("mxfp4-gpt-oss");
}

/// What modelopt's exporter writes of its algorithms, in words of compressed-tensors.
struct ModeloptAlgorithm {
  std::string_view name;
  std::string_view format;
  int weight_bits;
  int input_bits;  ///< 0: none are said, or nothing is calibrated
  int64_t group;   ///< 0: no groups
};
constexpr ModeloptAlgorithm kAlgorithms[] = {
    {"MXFP8", "mxfp8-modelopt", 8, 8, 32},
    {"FP8", "fp8-modelopt", 8, 8, 0},
    {"FP8_PER_CHANNEL_PER_TOKEN", "fp8-channel-modelopt", 8, 8, 0},
    {"NVFP4", "nvfp4-modelopt", 4, 4, 16},
    {"W4A16_NVFP4", "nvfp4-w4a16-modelopt", 4, 0, 16},
};

Status CheckModeloptArguments(const Json& json, const std::string& where, int bits, int64_t group) {
  std::vector<Field> fields = {{"dynamic"}, {"num_bits", {bits}}, {"type", {"float"}}};
  if (group > 0) fields.push_back({"group_size", {group}});
  return CheckFields(json, where + ".", fields);
}

/// config_groups repeats what quant_algo says; a group that says otherwise is of another algorithm.
Status CheckModeloptGroups(const Json& json, const ModeloptAlgorithm& algorithm) {
  if (algorithm.format == "mxfp8-modelopt" || IsSilent(json, "config_groups")) return OkStatus();
  const Json& groups = json["config_groups"];
  if (!groups.is_object() || groups.size() != 1 || !groups.front().is_object()) {
    return Undescribed("has config_groups of more than one group");
  }
  const Json& group = groups.front();
  std::vector<Field> fields = {{"weights"}, {"targets", {Json{"Linear"}}}};
  if (algorithm.input_bits > 0) fields.push_back({"input_activations"});
  WW_RETURN_IF_ERROR(CheckFields(group, "config_groups.", fields));
  for (const auto& [key, bits] : {std::pair("weights", algorithm.weight_bits),
                                  std::pair("input_activations", algorithm.input_bits)}) {
    if (IsSilent(group, key)) continue;
    if (!group[key].is_object()) return Undescribed(std::string("has no object ") + key);
    WW_RETURN_IF_ERROR(CheckModeloptArguments(group[key], std::string("config_groups.") + key, bits,
                                              algorithm.group));
  }
  return OkStatus();
}

Result<WeightFormat> ReadModelopt(const Json& json) {
  WW_ASSIGN(const std::optional<std::string> said, OptionalString(json, "quant_algo"));
  const auto algorithm =
      std::ranges::find(kAlgorithms, said.value_or(""), &ModeloptAlgorithm::name);
  if (algorithm == std::end(kAlgorithms)) {
    return Fail(
        Undescribed("has quant_algo \"" + said.value_or("").substr(0, 64) + "\" of modelopt"));
  }
  WW_FAIL_IF_ERROR(CheckFields(json, "",
                               {{"quant_method"},
                                {"quant_algo"},
                                {"producer"},
                                {"ignore"},
                                {"group_size", {algorithm->group}},
                                {"config_groups"},
                                {"kv_cache_scheme"}}));
  WW_FAIL_IF_ERROR(CheckModeloptGroups(json, *algorithm));
  WeightFormat format = Format(algorithm->format);
  if (!IsSilent(json, "kv_cache_scheme")) {
    const Json& scheme = json["kv_cache_scheme"];
    if (!scheme.is_object()) return Fail(Undescribed("has kv_cache_scheme " + Shown(scheme)));
    WW_FAIL_IF_ERROR(CheckFields(scheme, "kv_cache_scheme.",
                                 {{"dynamic", {false}}, {"num_bits", {8}}, {"type", {"float"}}}));
    format.kv = KvScales::kProjections;
  }
  return format;
}

/// torchao's files hold parts of its tensors, and say only in the metadata of each file of which
/// kind these are, which no list of names, dtypes and shapes tells. Its scales are of other
/// roundings for each kind, too, so that nothing here has the same numbers.
Result<WeightFormat> ReadTorchAo(const Json& json) {
  const Json said = json.value("quant_type", Json());
  const Json kind = said.is_object() ? said.value("default", Json()) : said;
  const Json name = kind.is_object() ? kind.value("_type", Json()) : kind;
  return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                     "quantization_config has quant_method \"torchao\", quant_type " + Shown(name) +
                         ": its weights are stored in parts (_weight_qdata, _weight_scale) of a "
                         "kind that only the metadata of each file tells")
                  .Remedy("make a checkpoint for the engine of the one in bf16 (wwctl convert "
                          "--quantize fp8-channel or int4-128-compressed-tensors, for example), or "
                          "run the engine in bf16, without quantization_config"));
}

struct Reader {
  std::string_view method;
  Result<WeightFormat> (*read)(const Json& json);
};
constexpr Reader kReaders[] = {
    {"fp8", ReadFp8},         {"mxfp8", ReadMxFp8},
    {"mxfp4", ReadMxFp4},     {"compressed-tensors", ReadCompressedTensors},
    {"torchao", ReadTorchAo}, {"modelopt", ReadModelopt}};

/// As its exporter writes it.
Json ModeloptConfigOf(const ModeloptAlgorithm& algorithm, const std::vector<std::string>& skipped) {
  Json json = {{"quant_method", "modelopt"}, {"quant_algo", algorithm.name}, {"ignore", skipped}};
  const bool silent = algorithm.group == 32 || algorithm.format == "fp8-channel-modelopt";
  if (silent) return json;
  const auto arguments = [&algorithm](int bits) {
    Json said = {{"dynamic", false}, {"num_bits", bits}, {"type", "float"}};
    if (algorithm.group > 0) said["group_size"] = algorithm.group;
    return said;
  };
  Json group = {{"weights", arguments(algorithm.weight_bits)}, {"targets", {"Linear"}}};
  if (algorithm.input_bits > 0) group["input_activations"] = arguments(algorithm.input_bits);
  json["config_groups"] = {{"group_0", std::move(group)}};
  return json;
}

/// The name of the tensor's module.
std::string_view ModuleOf(std::string_view tensor) {
  const size_t dot = tensor.rfind('.');
  return dot == std::string_view::npos ? tensor : tensor.substr(0, dot);
}

}  // namespace

Shape WeightFormat::StoredScales(const Shape& scales) const {
  if (rows == 0) return OfOne();
  const bool of_rows = OfModelopt() && columns == 0;  // a vector
  return of_rows ? Shape{scales[0]} : scales;
}

DType WeightFormat::CalibratedType(std::string_view scale_name, DType model) const {
  return OfModelopt() || scale_name == kInputGlobalScale ? DType::kF32 : model;
}

bool WeightFormat::Skips(std::string_view tensor) const {
  bool found = false;
  ForEachMatch(tensor, [&found](const std::string&) { found = true; });
  return found;
}

void WeightFormat::ForEachMatch(std::string_view tensor,
                                const std::function<void(const std::string&)>& visit) const {
  const std::string_view module = ModuleOf(tensor);
  const auto visit_named = [&](std::string_view part) {
    if (const auto entry = skipped.find(part); entry != skipped.end()) visit(*entry);
  };
  if (ignore == IgnoreRule::kNamesAndExpressions) {
    visit_named(module);
    for (size_t i = 0; i < expressions.size(); ++i) {
      if (std::regex_search(module.begin(), module.end(), expressions[i]->regex,
                            std::regex_constants::match_continuous)) {
        visit(patterns[i]);
      }
    }
    return;
  }
  if (ignore == IgnoreRule::kGlobs) {
    for (size_t end = module.find('.'); end != std::string_view::npos;
         end = module.find('.', end + 1)) {
      visit_named(module.substr(0, end));
    }
    visit_named(module);
  } else {
    for (size_t begin = 0; begin != std::string_view::npos && !skipped.empty();) {
      for (size_t end = begin; end != std::string_view::npos;) {
        end = tensor.find('.', end + 1);
        visit_named(tensor.substr(begin, end == std::string_view::npos ? end : end - begin));
      }
      begin = tensor.find('.', begin);
      if (begin != std::string_view::npos) ++begin;
    }
  }
  for (const std::string& pattern : patterns) {
    const std::string_view whole = ignore == IgnoreRule::kGlobs ? module : tensor;
    if (GlobMatches(pattern, whole) || GlobMatches(pattern + ".*", whole)) visit(pattern);
  }
}

Result<std::optional<WeightFormat>> ReadWeightFormat(const Json& json) {
  if (const auto old = json.find("compression_config"); old != json.end() && !old->is_null()) {
    return Fail(Undescribed("stands under compression_config, its old name"));
  }
  const auto it = json.find("quantization_config");
  if (it == json.end() || it->is_null()) return std::optional<WeightFormat>();
  if (!it->is_object()) return Fail(Undescribed("is no object"));
  WW_ASSIGN(const std::optional<std::string> method, OptionalString(*it, "quant_method"));
  if (!method) return Fail(Undescribed("has no quant_method"));
  const auto reader = std::ranges::find(kReaders, *method, &Reader::method);
  if (reader == std::end(kReaders)) {
    return Fail(Undescribed("has quant_method \"" + method->substr(0, 64) + "\""));
  }
  WW_ASSIGN(WeightFormat format, reader->read(*it));
  if (!IsSilent(*it, "modules_to_not_convert") && !IsSilent(*it, "ignored_layers") &&
      (*it)["modules_to_not_convert"] != (*it)["ignored_layers"]) {
    return Fail(Undescribed(
        "has modules_to_not_convert and, with other entries, ignored_layers, of which a loader "
        "reads one"));
  }
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"}) {
    WW_FAIL_IF_ERROR(AddSkipped(*it, key, format));
  }
  return format;
}

Result<Json> QuantizationConfigOf(std::string_view name, const std::vector<std::string>& skipped) {
  const auto found = std::ranges::find(Formats(), name, &WeightFormat::name);
  if (found == Formats().end()) {
    std::string known;
    for (const WeightFormat& format : Formats()) {
      known.append(known.empty() ? "" : ", ").append(format.name);
    }
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       "no format is called \"" + std::string(name.substr(0, 64)) + "\"")
                    .Remedy("use one of " + known));
  }
  if (found->OfModelopt()) {
    const auto algorithm = std::ranges::find(kAlgorithms, name, &ModeloptAlgorithm::format);
    WW_CHECK(algorithm != std::end(kAlgorithms));
    return ModeloptConfigOf(*algorithm, skipped);
  }
  if (found->OfFusedExperts()) {
    return Json{{"quant_method", "mxfp4"},
                {"modules_to_not_convert",
                 {"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                  "lm_head"}}};
  }
  if (found->ignore == IgnoreRule::kParts) {
    Json json = {{"quant_method", found->OneByte() ? "mxfp8" : "fp8"},
                 {"fmt", "e4m3"},
                 {"activation_scheme", "dynamic"},
                 {"weight_block_size", {found->rows, found->columns}},
                 {"modules_to_not_convert", skipped}};
    if (found->rule == ScaleRule::kPowerOfTwo) json["scale_fmt"] = "ue8m0";
    return json;
  }
  Json weights = {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"dynamic", false}};
  Json activations = {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"dynamic", true}};
  std::string format = "float-quantized";
  if (found->packed > 1) {
    const bool nv = found->rule == ScaleRule::kNvFp4;
    const bool integers = found->rule == ScaleRule::kInt4;
    format = integers ? "pack-quantized" : nv ? "nvfp4-pack-quantized" : "mxfp4-pack-quantized";
    weights.update({{"num_bits", 4},
                    {"type", integers ? "int" : "float"},
                    {"strategy", nv ? "tensor_group" : "group"},
                    {"group_size", found->columns}});
    if (!integers) weights["scale_dtype"] = nv ? "torch.float8_e4m3fn" : "torch.uint8";
    activations = nullptr;  // in the model's dtype
  } else if (found->OneByte()) {
    format = "mxfp8-quantized";
    for (Json* args : {&weights, &activations}) {
      args->update({{"strategy", "group"}, {"group_size", 32}, {"scale_dtype", "torch.uint8"}});
    }
  } else if (found->rows > 1) {
    weights.update({{"strategy", "block"}, {"block_structure", {found->rows, found->columns}}});
    activations.update({{"strategy", "group"}, {"group_size", found->columns}});
  } else {
    weights["strategy"] = found->rows == 1 ? "channel" : "tensor";
    activations["strategy"] = "token";
  }
  return Json{{"quant_method", "compressed-tensors"},
              {"format", format},
              {"quantization_status", "compressed"},
              {"ignore", skipped},
              {"config_groups",
               {{"group_0",
                 {{"targets", {"Linear"}},
                  {"weights", std::move(weights)},
                  {"input_activations", std::move(activations)},
                  {"output_activations", nullptr},
                  {"format", format}}}}}};
}

}  // namespace weightwire::layout
