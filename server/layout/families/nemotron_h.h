#pragma once

#include "server/layout/families/linear_attention.h"

namespace weightwire::layout {

/// Nemotron-H, Nemotron 2 and 3: each layer is one of Mamba 2, attention, an MLP or experts, with
/// one norm; MLPs and experts have no gate. MTP layers ("mtp.…"), several of which predict one
/// token together, are there where the parallel spec says so; transformers builds none.
namespace nemotron {

inline constexpr IsPresent kMlp = [](const ModelConfig&, const LayerKind& l) {
  return l.mlp && !l.moe;
};
inline constexpr IsPresent kMoeWithLatent = [](const ModelConfig& c, const LayerKind& l) {
  return l.moe && c.latent > 0;
};
inline constexpr IsPresent kMtpFirst = [](const ModelConfig&, const LayerKind& l) {
  return l.mtp_first;
};
inline constexpr IsPresent kMtpLast = [](const ModelConfig&, const LayerKind& l) {
  return l.mtp_last;
};
/// z, x, B, C and dt.
inline constexpr SizeOf kInRows = [](const ModelConfig& c) {
  return 2 * c.linear.HeadRows() + 2 * c.linear.GroupRows() + c.linear.heads;
};
inline constexpr SizeOf kLatent = [](const ModelConfig& c) { return c.latent; };
inline constexpr SizeOf kExpertWidth = [](const ModelConfig& c) {
  return c.latent > 0 ? c.latent : c.hidden;
};

/// Not quantized: no linear module in transformers.
constexpr TensorTemplate Router() {
  TensorTemplate router = parts::Matrix(Role::kRouter, "backbone.layers.{layer}.mixer.gate.weight",
                                        parts::kExperts, parts::kHidden, parts::kMoe);
  router.full_precision = true;
  return router;
}
constexpr TensorTemplate Correction() {
  TensorTemplate bias = parts::Vector(Role::kRouterCorrection,
                                      "backbone.layers.{layer}.mixer.gate.e_score_correction_bias",
                                      parts::kExperts, parts::kMoe);
  bias.dtype = DType::kF32;
  return bias;
}
constexpr TensorTemplate Attention(Role role, std::string_view name, SizeOf rows, SizeOf columns) {
  return parts::Matrix(role, name, rows, columns, linear::kAttention);
}
constexpr TensorTemplate Numbers(Role role, std::string_view name) {
  return parts::Vector(role, name, linear::kHeads, linear::kMamba);
}

}  // namespace nemotron

inline constexpr TensorTemplate kNemotronHTensors[] = {
    parts::Matrix(Role::kEmbed, "backbone.embeddings.weight", parts::kVocab, parts::kHidden),
    parts::kLmHead,
    parts::Vector(Role::kFinalNorm, "backbone.norm_f.weight", parts::kHidden),
    parts::Vector(Role::kInputNorm, "backbone.layers.{layer}.norm.weight", parts::kHidden),
    nemotron::Attention(Role::kQWeight, "backbone.layers.{layer}.mixer.q_proj.weight",
                        parts::kQRows, parts::kHidden),
    nemotron::Attention(Role::kKWeight, "backbone.layers.{layer}.mixer.k_proj.weight",
                        parts::kKvRows, parts::kHidden),
    nemotron::Attention(Role::kVWeight, "backbone.layers.{layer}.mixer.v_proj.weight",
                        parts::kKvRows, parts::kHidden),
    nemotron::Attention(Role::kOWeight, "backbone.layers.{layer}.mixer.o_proj.weight",
                        parts::kHidden, parts::kQRows),
    parts::Matrix(Role::kMambaIn, "backbone.layers.{layer}.mixer.in_proj.weight", nemotron::kInRows,
                  parts::kHidden, linear::kMamba),
    linear::Conv("backbone.layers.{layer}.mixer.conv1d.weight", linear::kMamba),
    parts::Vector(Role::kLinearConvBias, "backbone.layers.{layer}.mixer.conv1d.bias",
                  linear::kChannels, linear::kMambaWithConvBias),
    nemotron::Numbers(Role::kLinearALog, "backbone.layers.{layer}.mixer.A_log"),
    nemotron::Numbers(Role::kLinearD, "backbone.layers.{layer}.mixer.D"),
    nemotron::Numbers(Role::kLinearDtBias, "backbone.layers.{layer}.mixer.dt_bias"),
    parts::Vector(Role::kMambaNorm, "backbone.layers.{layer}.mixer.norm.weight", linear::kHeadRows,
                  linear::kMamba),
    parts::Matrix(Role::kLinearOut, "backbone.layers.{layer}.mixer.out_proj.weight", parts::kHidden,
                  linear::kHeadRows, linear::kMamba),
    parts::Matrix(Role::kUpWeight, "backbone.layers.{layer}.mixer.up_proj.weight",
                  parts::kIntermediate, parts::kHidden, nemotron::kMlp),
    parts::Matrix(Role::kDownWeight, "backbone.layers.{layer}.mixer.down_proj.weight",
                  parts::kHidden, parts::kIntermediate, nemotron::kMlp),
    nemotron::Router(),
    nemotron::Correction(),
    parts::Matrix(Role::kExpertLatentIn, "backbone.layers.{layer}.mixer.fc1_latent_proj.weight",
                  nemotron::kLatent, parts::kHidden, nemotron::kMoeWithLatent),
    parts::Matrix(Role::kExpertLatentOut, "backbone.layers.{layer}.mixer.fc2_latent_proj.weight",
                  parts::kHidden, nemotron::kLatent, nemotron::kMoeWithLatent),
    parts::Matrix(Role::kExpertUp, "backbone.layers.{layer}.mixer.experts.{expert}.up_proj.weight",
                  parts::kMoeIntermediate, nemotron::kExpertWidth, parts::kMoe),
    parts::Matrix(Role::kExpertDown,
                  "backbone.layers.{layer}.mixer.experts.{expert}.down_proj.weight",
                  nemotron::kExpertWidth, parts::kMoeIntermediate, parts::kMoe),
    parts::Matrix(Role::kSharedUp, "backbone.layers.{layer}.mixer.shared_experts.up_proj.weight",
                  parts::kSharedIntermediate, parts::kHidden, parts::kMoeWithShared),
    parts::Matrix(Role::kSharedDown,
                  "backbone.layers.{layer}.mixer.shared_experts.down_proj.weight", parts::kHidden,
                  parts::kSharedIntermediate, parts::kMoeWithShared),
    parts::Vector(Role::kMtpEmbedNorm, "backbone.layers.{layer}.enorm.weight", parts::kHidden,
                  nemotron::kMtpFirst),
    parts::Vector(Role::kMtpHiddenNorm, "backbone.layers.{layer}.hnorm.weight", parts::kHidden,
                  nemotron::kMtpFirst),
    parts::Matrix(Role::kMtpProjection, "backbone.layers.{layer}.eh_proj.weight", parts::kHidden,
                  parts::kTwiceHidden, nemotron::kMtpFirst),
    parts::Vector(Role::kMtpFinalNorm, "backbone.layers.{layer}.final_layernorm.weight",
                  parts::kHidden, nemotron::kMtpLast),
};

/// A letter for each layer: M (Mamba), * (attention), - (MLP), E (experts), from `lists` and the
/// text `letters`, which must agree where several are there; `fallback` where none is.
inline Result<std::string> NemotronLetters(const Json& json,
                                           std::initializer_list<const char*> lists,
                                           const char* letters, const char* fallback) {
  const auto bad = [](const std::string& key) {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       "the field " + key + " says no kinds of layers")
                    .Remedy("expected are the letters M*-E, or a list of linear_attention, "
                            "full_attention, mlp and moe"));
  };
  std::string_view by;
  std::string found;
  const auto agree = [&](const char* key, const std::string& pattern) -> Status {
    if (!by.empty() && pattern != found) return TwoValues(by, found, key, pattern);
    by = key;
    found = pattern;
    return OkStatus();
  };
  for (const char* key : lists) {
    const auto list = json.find(key);
    if (list == json.end() || list->is_null()) continue;
    if (!list->is_array() || list->empty()) return bad(key);
    std::string pattern;
    for (const Json& word : *list) {
      if (word == "linear_attention" || word == "mamba") {
        pattern += 'M';
      } else if (word == "full_attention" || word == "attention") {
        pattern += '*';
      } else if (word == "mlp") {
        pattern += '-';
      } else if (word == "moe") {
        pattern += 'E';
      } else {
        return bad(key);
      }
    }
    WW_FAIL_IF_ERROR(agree(key, pattern));
  }
  WW_ASSIGN(const std::optional<std::string> given, OptionalString(json, letters));
  if (given) {
    if (given->empty() || given->find_first_not_of("M*-E") != std::string::npos) {
      return bad(letters);
    }
    WW_FAIL_IF_ERROR(agree(letters, *given));
  }
  return by.empty() ? std::string(fallback) : found;
}

/// transformers 5 writes a list, older ones the pattern.
inline Result<std::string> NemotronPattern(const Json& json) {
  return NemotronLetters(json, {"layers_block_type", "layer_types"}, "hybrid_override_pattern",
                         "ME*-");
}

inline Status PrepareNemotronH(Json& json) {
  WW_ASSIGN_OR_STATUS(const std::string pattern, NemotronPattern(json));
  const auto layers = static_cast<int64_t>(pattern.size());
  WW_ASSIGN_OR_STATUS(const int64_t said, ReadSizeOr(json, "num_hidden_layers", layers));
  if (said != layers) {
    return TwoValues("num_hidden_layers", std::to_string(said), "the kinds of layers", pattern);
  }
  json["num_hidden_layers"] = layers;
  constexpr std::pair<const char*, const char*> kOlder[] = {{"attention_head_dim", "head_dim"},
                                                            {"mamba_n_groups", "n_groups"},
                                                            {"mamba_d_conv", "conv_kernel"},
                                                            {"mamba_conv_bias", "use_conv_bias"}};
  for (const auto& [older, key] : kOlder) {
    const auto given = json.find(older);
    if (given == json.end() || given->is_null()) continue;
    const auto same = json.find(key);
    if (same != json.end() && !same->is_null() && *same != *given) {
      return TwoValues(key, same->dump(), older, given->dump());
    }
    json[key] = *given;
  }
  if (!json.contains("intermediate_size")) json["intermediate_size"] = 21'504;
  return OkStatus();
}

inline Status ReadNemotronExperts(const Json& json, ModelConfig& config) {
  config.router_correction = true;
  WW_ASSIGN_OR_STATUS(config.experts, ReadExpertsOr(json, 8));
  WW_ASSIGN_OR_STATUS(config.moe_intermediate, ReadSizeOr(json, "moe_intermediate_size", 7'688));
  WW_ASSIGN_OR_STATUS(config.latent, ReadCountOr(json, "moe_latent_size", 0));
  WW_ASSIGN_OR_STATUS(config.shared_intermediate,
                      ReadSizeOr(json, "moe_shared_expert_intermediate_size", 7'688));
  WW_ASSIGN_OR_STATUS(const int64_t shared, ReadCountOr(json, "n_shared_experts", 1));
  if (shared == 1) return OkStatus();
  // transformers takes one whatever the number is, vLLM multiplies their size by it.
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                "config.json's n_shared_experts: expected 1, found " + std::to_string(shared))
      .Remedy("send explicit layouts");
}

inline void SetNemotronKind(char letter, LayerKind& kind) {
  kind.moe = letter == 'E';
  kind.mlp = letter == 'E' || letter == '-';
  kind.mixer = letter == 'M' ? Mixer::kMamba : letter == '*' ? Mixer::kAttention : Mixer::kNone;
}

inline Status ReadNemotronH(const Json& json, ModelConfig& config) {
  for (const char* key :
       {"mlp_bias", "use_bias", "mamba_proj_bias", "attention_bias", "tie_word_embeddings"}) {
    WW_RETURN_IF_ERROR(linear::CheckUnset(json, key));
  }
  constexpr std::array<const char*, 5> kKeys = {"n_groups", "mamba_num_heads", "ssm_state_size",
                                                "mamba_head_dim", "conv_kernel"};
  constexpr LinearConfig kDefaults = {
      .groups = 8, .heads = 128, .state = 128, .head_dim = 64, .kernel = 4};
  WW_RETURN_IF_ERROR(ReadLinear(json, kKeys, kDefaults, config));
  WW_ASSIGN_OR_STATUS(config.linear.conv_bias, ReadFlagOr(json, "use_conv_bias", true));
  WW_ASSIGN_OR_STATUS(const std::string pattern, NemotronPattern(json));
  for (size_t layer = 0; layer < pattern.size(); ++layer) {
    SetNemotronKind(pattern[layer], config.kinds[layer]);
  }
  return pattern.find('E') == std::string::npos ? OkStatus() : ReadNemotronExperts(json, config);
}

/// Attention and experts, the layers that engines build there.
inline Status AddNemotronMtp(const Json& json, bool fused, ModelConfig& config) {
  if (fused) return BadMtp(config, "its experts are a tensor each: mtp=single");
  WW_ASSIGN_OR_STATUS(const int64_t count, ReadCountOr(json, "num_nextn_predict_layers", 0));
  if (count != 1) {
    return BadMtp(config,
                  "one num_nextn_predict_layers is described, and it has " + std::to_string(count));
  }
  WW_ASSIGN_OR_STATUS(
      const std::string pattern,
      NemotronLetters(json, {"mtp_layers_block_type"}, "mtp_hybrid_override_pattern", ""));
  if (pattern.empty() || pattern.find_first_not_of("*E") != std::string::npos) {
    return BadMtp(config, "mtp_hybrid_override_pattern is \"" + pattern.substr(0, 64) +
                              "\", and layers of attention (*) and experts (E) are described");
  }
  if (pattern.find('E') != std::string::npos && !config.HasExperts()) {
    WW_RETURN_IF_ERROR(ReadNemotronExperts(json, config));
  }
  for (size_t at = 0; at < pattern.size(); ++at) {
    LayerKind kind{.mtp = true, .mtp_first = at == 0, .mtp_last = at + 1 == pattern.size()};
    SetNemotronKind(pattern[at], kind);
    config.kinds.push_back(kind);
  }
  config.mtp_layers = std::ssize(pattern);
  return OkStatus();
}

inline constexpr Family kNemotronH = {.model_type = "nemotron_h",
                                      .tensors = kNemotronHTensors,
                                      .read = ReadNemotronH,
                                      .defaults = {.kv_heads = 8, .head_dim = 128},
                                      .mtp = AddNemotronMtp,
                                      .mtp_layers = "mtp.layers.",
                                      .prepare = PrepareNemotronH};

}  // namespace weightwire::layout
