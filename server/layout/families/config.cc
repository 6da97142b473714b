#include "server/layout/families/config.h"

#include <algorithm>
#include <charconv>

#include "server/layout/families/family.h"
#include "server/layout/families/wrapper.h"
#include "server/layout/torch_dtype.h"

namespace weightwire::layout {
namespace {

/// More heads than any model; bounds the pieces of one fused tensor.
constexpr int64_t kHeadsMax = 65'536;
constexpr int64_t kSizeMax = (int64_t{1} << 31) - 1;
constexpr const char* kLayerSizes = "per_layer_config";

Result<const Family*> FindFamily(const std::string& model_type) {
  std::string known;
  for (const Family& family : Families()) {
    if (family.model_type == model_type) return &family;
    known.append(known.empty() ? "" : ", ").append(family.model_type);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kUnknownModel,
                     "config.json's model_type: expected one that a family describes, found \"" +
                         model_type.substr(0, 64) + "\"")
                  .Remedy("use one of " + known + ", or send explicit layouts"));
}

Result<int64_t> CheckSize(const char* key, int64_t value, int64_t least) {
  if (value < least) {
    return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                std::string("the field ") + key + " is " + std::to_string(value) +
                    "; it must be at least " + std::to_string(least));
  }
  if (value > kSizeMax) {
    return Fail(Code::kInvalidArgument, Reason::kShapeOverflow,
                std::string("the field ") + key + " is " + std::to_string(value) +
                    "; sizes must be below 2^31");
  }
  return value;
}

/// 0 when it is neither given nor to be had from the other sizes: latent attention has none.
Result<int64_t> HeadDim(const Json& json, const ModelConfig& config, const Defaults& defaults) {
  WW_ASSIGN(const std::optional<int64_t> given, OptionalInteger(json, "head_dim"));
  if (given) return ReadSize(json, "head_dim");
  if (defaults.head_dim > 0 && !json.contains("head_dim")) return defaults.head_dim;
  return config.hidden % config.heads == 0 ? config.hidden / config.heads : 0;
}

Status ReadHeads(const Json& json, const Defaults& defaults, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.heads, ReadSize(json, "num_attention_heads"));
  const bool silent = !json.contains("num_key_value_heads") && defaults.kv_heads > 0 &&
                      config.heads % defaults.kv_heads == 0;
  WW_ASSIGN_OR_STATUS(config.kv_heads, ReadSizeOr(json, "num_key_value_heads",
                                                  silent ? defaults.kv_heads : config.heads));
  if (config.heads > kHeadsMax) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            "num_attention_heads is over " + std::to_string(kHeadsMax)};
  }
  if (config.heads % config.kv_heads != 0) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "num_attention_heads is no multiple of num_key_value_heads"};
  }
  WW_ASSIGN_OR_STATUS(config.head_dim, HeadDim(json, config, defaults));
  return OkStatus();
}

/// transformers 4 writes torch_dtype, 5 dtype.
Status ReadDType(const Json& json, DType& dtype) {
  WW_ASSIGN_OR_STATUS(std::optional<std::string> name, OptionalString(json, "dtype"));
  if (!name) {
    WW_ASSIGN_OR_STATUS(name, OptionalString(json, "torch_dtype"));
  }
  if (!name) return OkStatus();
  const std::optional<DType> known = DTypeFromTorchName(*name);
  if (!known) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "the dtype \"" + name->substr(0, 64) + "\" is unknown"};
  }
  dtype = *known;
  return OkStatus();
}

Status ReadCommon(const Json& json, const Defaults& defaults, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.hidden, ReadSize(json, "hidden_size"));
  WW_ASSIGN_OR_STATUS(config.layers, ReadSize(json, "num_hidden_layers"));
  WW_ASSIGN_OR_STATUS(config.intermediate, ReadSizeOr(json, "intermediate_size", 0));
  WW_ASSIGN_OR_STATUS(config.vocab, ReadSize(json, "vocab_size"));
  WW_RETURN_IF_ERROR(ReadHeads(json, defaults, config));
  WW_ASSIGN_OR_STATUS(config.tied, ReadFlagOr(json, "tie_word_embeddings", defaults.tied));
  WW_ASSIGN_OR_STATUS(config.attention_bias, ReadFlagOr(json, "attention_bias", false));
  WW_ASSIGN_OR_STATUS(config.mlp_bias, ReadFlagOr(json, "mlp_bias", false));
  const auto limit = static_cast<int64_t>(LayoutLimits{}.canonical_tensors_max);
  if (config.layers > limit) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            "num_hidden_layers is " + std::to_string(config.layers) + ", more than fit " +
                std::to_string(limit) + " tensors"};
  }
  config.kinds.resize(static_cast<size_t>(config.layers));
  return ReadDType(json, config.dtype);
}

/// The members of `text_config`, where a model with other towers keeps its text model's sizes, laid
/// over the others.
Json WithTextConfig(const Json& json) {
  Json flat = json;
  const auto text = json.find("text_config");
  if (text != json.end() && text->is_object()) flat.update(*text);
  return flat;
}

Status CheckNestedQuantization(const Json& json) {
  for (const auto& [key, part] : json.items()) {
    if (key == "text_config" || !part.is_object()) continue;
    const auto found = part.find("quantization_config");
    if (found == part.end() || found->is_null()) continue;
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "config.json has a quantization_config in " + key.substr(0, 64) +
                      ", where it is not read")
        .Remedy("one that counts stands beside model_type or in text_config");
  }
  const auto text = json.find("text_config");
  if (text == json.end() || !text->is_object()) return OkStatus();
  const auto outer = json.find("quantization_config");
  const auto inner = text->find("quantization_config");
  if (outer == json.end() || inner == text->end() || *outer == *inner) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "config.json has one quantization_config in text_config and another beside it")
      .Remedy("keep one of them, or make both the same");
}

Status TieDiffers(bool outer, bool inner, const char* said) {
  const auto word = [](bool value) { return std::string(value ? "true" : "false"); };
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "config.json's tie_word_embeddings: expected " + word(outer) +
                    " in text_config as beside it, found " + word(inner) + said)
      .AtTensor("lm_head.weight")
      .Remedy("make both say whether lm_head is the embedding");
}

/// Loaders differ in which of the two they follow, so both must say the same. Where only the outer
/// one speaks, those that read text_config take the text model's default.
/// `silent`: that default; nullopt where the outer one holds.
Status CheckNestedTie(const Json& json, std::optional<bool> silent) {
  const auto text = json.find("text_config");
  if (text == json.end() || !text->is_object()) return OkStatus();
  WW_ASSIGN_OR_STATUS(const auto outer, OptionalBool(json, "tie_word_embeddings"));
  WW_ASSIGN_OR_STATUS(const auto inner, OptionalBool(*text, "tie_word_embeddings"));
  if (!outer || inner.value_or(silent.value_or(*outer)) == *outer) return OkStatus();
  return TieDiffers(*outer, inner.value_or(silent.value_or(*outer)), inner ? "" : " (its default)");
}

/// Sizes that some models do without: those that this one needs are there.
Status CheckComplete(const ModelConfig& config) {
  if (config.head_dim == 0 && !config.IsLatent()) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "hidden_size is no multiple of num_attention_heads and head_dim is not given"};
  }
  const auto dense = std::ranges::find_if(
      config.kinds, [](const LayerKind& kind) { return kind.mlp && !kind.moe; });
  if (config.intermediate > 0 || dense == config.kinds.end()) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "the field intermediate_size is missing, and layer " +
                    std::to_string(dense - config.kinds.begin()) + " has no experts")
      .Remedy("give intermediate_size; only a model of which every layer has experts needs none");
}

/// kv heads of layers that have a number of their own.
Status CheckLayerHeads(const ModelConfig& config) {
  for (const LayerKind& kind : config.kinds) {
    if (kind.kv_heads == 0 || config.heads % kind.kv_heads == 0) continue;
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "num_attention_heads is no multiple of the key and value heads of layer " +
                std::to_string(&kind - config.kinds.data())};
  }
  return OkStatus();
}

/// transformers 5 writes this for any model whose layers differ; where a family does not read it,
/// sizes would be those of other layers.
Status CheckLayerSizes(const Json& json, const Family& text) {
  const auto sizes = json.find(kLayerSizes);
  if (text.layer_sizes || sizes == json.end() || sizes->is_null() || sizes->empty()) {
    return OkStatus();
  }
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                std::string("config.json has ") + kLayerSizes + ", which family " +
                    std::string(text.model_type) + " does not read")
      .Remedy("send explicit layouts");
}

Status AddMtpLayers(const Json& json, const Family& text, MtpWord mtp, ModelConfig& config) {
  const bool wanted = mtp == MtpWord::kSingle || mtp == MtpWord::kFused;
  if (text.mtp != nullptr) {
    return wanted ? text.mtp(json, mtp == MtpWord::kFused, config) : OkStatus();
  }
  if (wanted && config.mtp_layers == 0) return BadMtp(config, "it has no MTP layers");
  if (mtp == MtpWord::kFused) return BadMtp(config, "its experts are a tensor each: mtp=single");
  for (int64_t i = 0; i < config.mtp_layers; ++i) {
    config.kinds.push_back({.moe = config.HasExperts(), .mtp = true});
  }
  return OkStatus();
}

/// 0 and up, in decimal digits.
std::optional<int64_t> IntegerText(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

/// Numbers of decoder layers; none when `key` is absent or null.
Result<std::vector<size_t>> LayerList(const Json& json, const char* key, int64_t layers) {
  std::vector<size_t> listed;
  const auto it = json.find(key);
  if (it == json.end() || it->is_null()) return listed;
  for (const Json& entry : it->is_array() ? *it : Json::array({*it})) {
    const std::optional<int64_t> layer = AsInteger(entry);
    if (!layer || *layer < 0 || *layer >= layers) {
      return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                  std::string("the field ") + key + " is no list of layer numbers");
    }
    listed.push_back(static_cast<size_t>(*layer));
  }
  return listed;
}

}  // namespace

Status TwoValues(std::string_view key, const std::string& value, std::string_view other,
                 const std::string& other_value) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "config.json says " + std::string(key) + " " + value.substr(0, 64) + " and " +
                    std::string(other) + " " + other_value.substr(0, 64) +
                    ", which both mean the same")
      .Remedy("correct one of the two, or take it out: loaders differ in which they read");
}

Status BadMtp(const ModelConfig& config, std::string_view why) {
  return Status(Code::kInvalidArgument, Reason::kUnknownScheme,
                "the parallel spec's mtp= does not fit config.json's " + config.family + ": " +
                    std::string(why))
      .Remedy("leave the MTP layers out by mtp=none, or send explicit layouts");
}

int64_t ModelConfig::HeadDim(int64_t layer) const {
  const int64_t own = kinds[static_cast<size_t>(layer)].head_dim;
  return own > 0 ? own : head_dim;
}

int64_t ModelConfig::KvHeads(int64_t layer) const {
  const int64_t own = kinds[static_cast<size_t>(layer)].kv_heads;
  return own > 0 ? own : kv_heads;
}

ModelConfig ModelConfig::Of(const LayerKind& kind) const {
  ModelConfig of = *this;
  of.kinds.clear();
  if (kind.head_dim > 0) of.head_dim = kind.head_dim;
  if (kind.kv_heads > 0) of.kv_heads = kind.kv_heads;
  if (kind.intermediate > 0) of.intermediate = kind.intermediate;
  return of;
}

bool ModelConfig::IsHybrid() const {
  return std::ranges::any_of(kinds, [](const LayerKind& kind) { return !kind.mlp; });
}

Result<int64_t> ReadSize(const Json& json, const char* key) {
  WW_ASSIGN(const int64_t value, RequiredInteger(json, key));
  return CheckSize(key, value, 1);
}

Result<int64_t> ReadSizeOr(const Json& json, const char* key, int64_t fallback) {
  WW_ASSIGN(const std::optional<int64_t> value, OptionalInteger(json, key));
  return value ? CheckSize(key, *value, 1) : fallback;
}

Result<int64_t> ReadCountOr(const Json& json, const char* key, int64_t fallback) {
  WW_ASSIGN(const std::optional<int64_t> value, OptionalInteger(json, key));
  return value ? CheckSize(key, *value, 0) : fallback;
}

Result<int64_t> ReadExpertsOr(const Json& json, int64_t fallback) {
  return ReadSynonymsOr(json, {"num_experts", "num_local_experts", "n_routed_experts"}, fallback);
}

Result<int64_t> ReadSynonymsOr(const Json& json, std::initializer_list<const char*> keys,
                               int64_t fallback) {
  const char* by = nullptr;
  int64_t found = 0;
  bool silent = true;
  for (const char* key : keys) {
    silent = silent && !json.contains(key);
    WW_ASSIGN(const std::optional<int64_t> value, OptionalInteger(json, key));
    if (!value) continue;
    WW_ASSIGN(const int64_t count, CheckSize(key, *value, 0));
    if (by != nullptr && count != found) {
      return Fail(TwoValues(by, std::to_string(found), key, std::to_string(count)));
    }
    by = key;
    found = count;
  }
  return silent ? fallback : found;
}

Result<bool> ReadFlagOr(const Json& json, const char* key, bool fallback) {
  WW_ASSIGN(const std::optional<bool> value, OptionalBool(json, key));
  return value.value_or(fallback);
}

Status ReadLinear(const Json& json, std::array<const char*, 5> keys, LinearConfig defaults,
                  ModelConfig& config) {
  LinearConfig& linear = config.linear = defaults;
  int64_t* sizes[] = {&linear.groups, &linear.heads, &linear.state, &linear.head_dim,
                      &linear.kernel};
  for (size_t i = 0; i < keys.size(); ++i) {
    WW_ASSIGN_OR_STATUS(*sizes[i], ReadSizeOr(json, keys[i], *sizes[i]));
  }
  if (linear.heads > kHeadsMax) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            std::string(keys[1]) + " is over " + std::to_string(kHeadsMax)};
  }
  if (linear.heads % linear.groups != 0) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            std::string(keys[1]) + " is no multiple of " + keys[0]};
  }
  return OkStatus();
}

Status SetMoeLayers(const Json& json, int64_t first, int64_t step, const char* dense_key,
                    ModelConfig& config) {
  for (int64_t layer = first; layer < config.layers; ++layer) {
    config.kinds[static_cast<size_t>(layer)].moe = config.HasExperts() && (layer + 1) % step == 0;
  }
  WW_ASSIGN_OR_STATUS(const std::vector<size_t> dense, LayerList(json, dense_key, config.layers));
  for (size_t layer : dense) config.kinds[layer].moe = false;
  return OkStatus();
}

Result<std::vector<std::string>> ReadLayerWords(const Json& json, const char* key, int64_t layers) {
  std::vector<std::string> words;
  const auto it = json.find(key);
  if (it == json.end() || it->is_null()) return words;
  if (it->is_string()) {
    for (const char letter : it->get_ref<const std::string&>()) words.emplace_back(1, letter);
  }
  for (const Json& entry : it->is_array() ? *it : Json::array()) {
    if (entry.is_string()) words.push_back(entry.get<std::string>());
  }
  if (std::ssize(words) == layers) return words;
  return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
              std::string("the field ") + key + " is no list of one word for each of " +
                  std::to_string(layers) + " layers");
}

Result<bool> ReadLayerSizes(const Json& json, ModelConfig& config) {
  const auto sizes = json.find(kLayerSizes);
  if (sizes == json.end() || sizes->is_null()) return false;
  const auto bad = [](const std::string& what) {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       std::string("the field ") + kLayerSizes + " " + what)
                    .Remedy("send explicit layouts"));
  };
  if (!sizes->is_object()) return bad("is no object with an entry for each layer that differs");
  for (const auto& [number, fields] : sizes->items()) {
    const std::optional<int64_t> layer = IntegerText(number);
    if (!layer || *layer >= config.layers || !fields.is_object()) {
      return bad("speaks of \"" + number.substr(0, 64) + "\", which is no layer");
    }
    LayerKind& kind = config.kinds[static_cast<size_t>(*layer)];
    for (const auto& [field, value] : fields.items()) {
      if (field == "head_dim") {
        WW_ASSIGN(kind.head_dim, ReadSize(fields, "head_dim"));
      } else if (field == "num_key_value_heads") {
        WW_ASSIGN(kind.kv_heads, ReadSize(fields, "num_key_value_heads"));
      } else {
        return bad("has the field " + field.substr(0, 64) + ", which is not understood");
      }
    }
  }
  return true;
}

Status SetListedMoeLayers(const Json& json, const char* key, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(const std::vector<size_t> listed, LayerList(json, key, config.layers));
  for (size_t layer : listed) config.kinds[layer].moe = config.HasExperts();
  return OkStatus();
}

Result<ModelConfig> ParseModelConfig(std::string_view config_json, MtpWord mtp) {
  WW_ASSIGN(const Json json, ParseObject(config_json, "config.json"));
  ModelConfig config;
  WW_ASSIGN(config.family, RequiredString(json, "model_type"));
  WW_ASSIGN(const Family* family, FindFamily(config.family));
  WW_ASSIGN(const Family* text, TextFamily(*family, json));
  config.text_family = text->model_type;
  const bool follows_outer = family->wrapper != nullptr && family->wrapper->outer_tie;
  WW_FAIL_IF_ERROR(CheckNestedTie(
      json, follows_outer ? std::nullopt : std::optional<bool>(text->defaults.tied)));
  WW_FAIL_IF_ERROR(CheckNestedQuantization(json));
  WW_ASSIGN(Json flat,
            config.IsWrapper() ? WrappedTextConfig(json) : Result<Json>(WithTextConfig(json)));
  if (text->prepare != nullptr) WW_FAIL_IF_ERROR(text->prepare(flat));
  WW_FAIL_IF_ERROR(CheckLayerSizes(flat, *text));
  WW_ASSIGN(config.scales, ReadWeightFormat(flat));
  if (config.scales && config.scales->OfFusedExperts() && config.text_family != "gpt_oss") {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       "quant_method \"mxfp4\" is described for the experts of gpt_oss, found " +
                           config.family)
                    .Remedy("take compressed-tensors' MXFP4 (mxfp4-compressed-tensors)"));
  }
  WW_FAIL_IF_ERROR(ReadCommon(flat, text->defaults, config));
  if (text->read != nullptr) WW_FAIL_IF_ERROR(text->read(flat, config));
  if (config.IsWrapper()) WW_FAIL_IF_ERROR(family->wrapper->read(json, config));
  WW_FAIL_IF_ERROR(CheckComplete(config));
  WW_FAIL_IF_ERROR(CheckLayerHeads(config));
  WW_FAIL_IF_ERROR(AddMtpLayers(flat, *text, mtp, config));
  if (config.experts > kHeadsMax) {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                "config.json has more than " + std::to_string(kHeadsMax) + " experts");
  }
  return config;
}

}  // namespace weightwire::layout
