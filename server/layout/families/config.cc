#include <algorithm>

#include "server/layout/families/family.h"
#include "server/layout/json_reader.h"
#include "server/layout/torch_dtype.h"

namespace weightwire::layout {
namespace {

/// More heads than any model; bounds the pieces of one fused tensor.
constexpr int64_t kHeadsMax = 65'536;

Result<const Family*> FindFamily(const std::string& model_type) {
  std::string known;
  for (const Family& family : Families()) {
    if (family.model_type == model_type) return &family;
    known.append(known.empty() ? "" : ", ").append(family.model_type);
  }
  return Fail(Status(Code::kInvalidArgument, Reason::kUnknownModel,
                     "no family describes model_type \"" + model_type.substr(0, 64) + "\"")
                  .Remedy("use one of " + known + ", or send explicit layouts"));
}

Result<int64_t> PositiveSize(const Json& json, const char* key) {
  WW_ASSIGN(const int64_t value, RequiredInteger(json, key));
  if (value < 1) {
    return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                std::string("the field ") + key + " is " + std::to_string(value) +
                    "; it must be at least 1");
  }
  return value;
}

Result<int64_t> PositiveSizeOr(const Json& json, const char* key, int64_t fallback) {
  WW_ASSIGN(const std::optional<int64_t> value, OptionalInteger(json, key));
  if (!value) return fallback;
  return PositiveSize(json, key);
}

Result<int64_t> HeadDim(const Json& json, const Family& family, const ModelConfig& config) {
  if (family.head_dim_when_absent && !json.contains("head_dim")) {
    return *family.head_dim_when_absent;
  }
  WW_ASSIGN(const std::optional<int64_t> given, OptionalInteger(json, "head_dim"));
  if (given) return PositiveSize(json, "head_dim");
  if (config.hidden % config.heads != 0) {
    return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                "hidden_size is no multiple of num_attention_heads and head_dim is not given");
  }
  return config.hidden / config.heads;
}

Status ReadHeads(const Json& json, const Family& family, ModelConfig& config) {
  WW_ASSIGN_OR_STATUS(config.heads, PositiveSize(json, "num_attention_heads"));
  WW_ASSIGN_OR_STATUS(config.kv_heads, PositiveSizeOr(json, "num_key_value_heads", config.heads));
  if (config.heads > kHeadsMax) {
    return {Code::kResourceExhausted, Reason::kLimitExceeded,
            "num_attention_heads is over " + std::to_string(kHeadsMax)};
  }
  if (config.heads % config.kv_heads != 0) {
    return {Code::kInvalidArgument, Reason::kInvalidRequest,
            "num_attention_heads is no multiple of num_key_value_heads"};
  }
  WW_ASSIGN_OR_STATUS(config.head_dim, HeadDim(json, family, config));
  return OkStatus();
}

Status ReadFlag(const Json& json, const char* key, bool& flag) {
  WW_ASSIGN_OR_STATUS(const std::optional<bool> value, OptionalBool(json, key));
  flag = value.value_or(false);
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

}  // namespace

Result<ModelConfig> ParseModelConfig(std::string_view config_json) {
  WW_ASSIGN(const Json json, ParseObject(config_json, "config.json"));
  ModelConfig config;
  WW_ASSIGN(config.family, RequiredString(json, "model_type"));
  WW_ASSIGN(const Family* family, FindFamily(config.family));
  if (json.contains("quantization_config")) {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       "config.json has a quantization_config, whose tensors no family describes")
                    .Remedy("send explicit layouts"));
  }
  WW_ASSIGN(config.hidden, PositiveSize(json, "hidden_size"));
  WW_ASSIGN(config.layers, PositiveSize(json, "num_hidden_layers"));
  WW_ASSIGN(config.intermediate, PositiveSize(json, "intermediate_size"));
  WW_ASSIGN(config.vocab, PositiveSize(json, "vocab_size"));
  WW_FAIL_IF_ERROR(ReadHeads(json, *family, config));
  WW_FAIL_IF_ERROR(ReadFlag(json, "tie_word_embeddings", config.tied));
  WW_FAIL_IF_ERROR(ReadFlag(json, "attention_bias", config.attention_bias));
  WW_FAIL_IF_ERROR(ReadFlag(json, "mlp_bias", config.mlp_bias));
  WW_FAIL_IF_ERROR(ReadDType(json, config.dtype));
  return config;
}

}  // namespace weightwire::layout
