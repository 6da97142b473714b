// What config.json says about each family, and what its fields mean.
#include <algorithm>

#include "tests/support/family_oracle_model.h"

namespace weightwire::family_oracle {
namespace {

class Json {
 public:
  void Number(const char* key, int64_t value) { Raw(key, std::to_string(value)); }
  void Flag(const char* key, bool value) { Raw(key, value ? "true" : "false"); }
  void Text(const char* key, const std::string& value) {
    Raw(key, std::string("\"") + value + "\"");
  }
  void List(const char* key, const std::set<int64_t>& values) {
    std::string text = "[";
    for (int64_t value : values) {
      if (text.size() > 1) text += ", ";
      text += std::to_string(value);
    }
    Raw(key, text + "]");
  }
  void Raw(const char* key, const std::string& value) {
    text_ += (text_.empty() ? "{\"" : ", \"") + std::string(key) + "\": " + value;
  }
  std::string Done() const { return text_ + "}"; }

 private:
  std::string text_;
};

void WriteVision(const Vision& v, Json& json) {
  Json tower;
  tower.Number("depth", v.depth);
  tower.Number("hidden_size", v.hidden);
  tower.Number("num_heads", v.heads);
  tower.Number("intermediate_size", v.intermediate);
  tower.Number("in_channels", v.channels);
  tower.Number("temporal_patch_size", v.frames);
  tower.Number("patch_size", v.patch);
  tower.Number("spatial_merge_size", v.merge);
  tower.Number("out_hidden_size", v.out);
  json.Raw("vision_config", tower.Done());
}

void WriteMixture(const Config& c, Json& json) {
  if (c.Is({"llama4_text"})) {
    json.Number("num_local_experts", c.experts);
    json.Number("intermediate_size_mlp", c.intermediate);
    if (c.lists_moe_layers) {
      json.List("moe_layers", c.moe_layers);
    } else {
      json.Number("interleave_moe_layer_step", c.step);
    }
    return;
  }
  if (c.Is({"mixtral", "gpt_oss"})) {
    json.Number("num_local_experts", c.experts);  // intermediate_size is an expert's
    return;
  }
  json.Number("moe_intermediate_size", c.moe_intermediate);
  if (c.Is({"qwen2_moe", "qwen3_moe"})) {
    json.Number("num_experts", c.experts);
    json.Number("decoder_sparse_step", c.step);
    json.List("mlp_only_layers", c.dense_layers);
    if (c.Is({"qwen2_moe"})) json.Number("shared_expert_intermediate_size", c.shared_intermediate);
    return;
  }
  json.Number("n_routed_experts", c.experts);
  json.Number("n_shared_experts", c.shared_experts);
  json.Number("first_k_dense_replace", c.first_dense);
  if (c.Latent()) json.Number("moe_layer_freq", c.step);
}

}  // namespace

const std::vector<std::string>& KnownFamilies() {
  static const std::vector<std::string> families = {
      "llama",     "mistral",  "mixtral", "qwen2",       "qwen2_moe",   "qwen3",
      "qwen3_moe", "gemma",    "gemma2",  "gemma3_text", "deepseek_v2", "deepseek_v3",
      "kimi_k2",   "glm4_moe", "gpt_oss", "llama4_text", "phi3",        "qwen2_5_vl"};
  return families;
}

bool Config::Is(std::initializer_list<const char*> families) const {
  return std::any_of(families.begin(), families.end(),
                     [this](const char* name) { return family == name; });
}

bool Config::MoeLayer(int64_t layer) const {
  if (layer >= layers || Is({"mixtral", "gpt_oss"})) return true;
  if (Is({"qwen2_moe", "qwen3_moe"})) {
    return (layer + 1) % step == 0 && !dense_layers.contains(layer);
  }
  if (Is({"llama4_text"})) {
    return lists_moe_layers ? moe_layers.contains(layer) : (layer + 1) % step == 0;
  }
  if (Latent()) return layer >= first_dense && layer % step == 0;
  return Is({"glm4_moe"}) && layer >= first_dense;
}

bool Config::AnyDenseLayer() const {
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (!MoeLayer(layer)) return true;
  }
  return false;
}

bool Config::AnyMoeLayer() const {
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (MoeLayer(layer)) return true;
  }
  return false;
}

int64_t Config::SharedSize() const {
  if (Is({"qwen2_moe"})) return shared_intermediate;
  if (Is({"llama4_text"})) return moe_intermediate;
  return Latent() || Is({"glm4_moe"}) ? shared_experts * moe_intermediate : 0;
}

bool Config::QkvBias() const {
  if (Is({"qwen2", "qwen2_moe", "qwen2_5_vl"})) return true;
  if (Is({"mistral", "mixtral", "phi3"}) || Latent()) return false;
  return attention_bias;
}
bool Config::OBias() const {
  return QkvBias() && !Is({"qwen2", "qwen2_moe", "qwen2_5_vl", "glm4_moe"});
}
bool Config::HeadNorms() const {
  return Is({"qwen3", "qwen3_moe", "gemma3_text"}) || (Is({"glm4_moe"}) && use_qk_norm);
}

std::string ConfigJson(const Config& c) {
  Json outer, json;
  Json& whole = c.nests_text ? outer : json;
  whole.Text("model_type", c.family);
  if (c.vision.depth > 0) WriteVision(c.vision, whole);
  json.Number("hidden_size", c.hidden);
  json.Number("num_hidden_layers", c.layers);
  json.Number("num_attention_heads", c.heads);
  json.Number("num_key_value_heads", c.kv_heads);
  if (c.says_head_dim) json.Number("head_dim", c.head_dim);
  const bool expert_size = c.Is({"mixtral", "gpt_oss", "llama4_text"});
  json.Number("intermediate_size", expert_size ? c.moe_intermediate : c.intermediate);
  json.Number("vocab_size", c.vocab);
  if (c.says_tied) json.Flag("tie_word_embeddings", c.tied);
  // Families without such biases have no such field, or ignore it.
  if (!c.Latent()) json.Flag("attention_bias", c.attention_bias);
  if (c.Is({"llama", "mistral", "qwen2", "qwen3"})) json.Flag("mlp_bias", c.mlp_bias);
  if (c.Is({"glm4_moe"})) json.Flag("use_qk_norm", c.use_qk_norm);
  if (c.Mixture()) WriteMixture(c, json);
  if (c.nests_text) {
    outer.Raw("text_config", json.Done());
    return outer.Done();
  }
  if (!c.Latent()) return json.Done();
  if (c.q_lora > 0) {
    json.Number("q_lora_rank", c.q_lora);
  } else {
    json.Raw("q_lora_rank", "null");
  }
  json.Number("kv_lora_rank", c.kv_lora);
  json.Number("qk_nope_head_dim", c.nope);
  json.Number("qk_rope_head_dim", c.rope);
  json.Number("v_head_dim", c.v_dim);
  if (c.HasMtp()) json.Number("num_nextn_predict_layers", c.mtp);
  return json.Done();
}

}  // namespace weightwire::family_oracle
