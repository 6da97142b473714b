// What config.json says about each family, and what its fields mean.
#include <algorithm>
#include <map>

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
  void Words(const char* key, const std::vector<std::string>& words) {
    std::string text = "[";
    for (const std::string& word : words) {
      text += (text.size() > 1 ? ", \"" : "\"") + word + "\"";
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

void WriteSiglip(const Vision& v, Json& tower) {
  tower.Number("num_hidden_layers", v.depth);
  tower.Number("hidden_size", v.hidden);
  tower.Number("num_attention_heads", v.heads);
  tower.Number("intermediate_size", v.intermediate);
  tower.Number("num_channels", v.channels);
  tower.Number("patch_size", v.patch);
  tower.Number("image_size", v.patch * v.side + v.patch / 2);
}

/// The tower of a wrapper, and what stands beside it.
void WriteTower(const Config& c, Json& json) {
  const Vision& v = c.vision;
  Json tower;
  if (c.family == "kimi_k25") {
    tower.Number("vt_num_hidden_layers", v.depth);
    tower.Number("vt_hidden_size", v.hidden);
    tower.Number("vt_num_attention_heads", v.heads);
    tower.Number("vt_intermediate_size", v.intermediate);
    tower.Number("patch_size", v.patch);
    tower.Number("init_pos_emb_height", v.side);
    tower.Number("init_pos_emb_width", v.side + 1);
    tower.List("merge_kernel_size", {v.merge, v.merge + 1});
  } else if (c.family == "qwen3_vl" || c.family == "qwen3_vl_moe") {
    tower.Number("depth", v.depth);
    tower.Number("hidden_size", v.hidden);
    tower.Number("num_heads", v.heads);
    tower.Number("intermediate_size", v.intermediate);
    tower.Number("in_channels", v.channels);
    tower.Number("temporal_patch_size", v.frames);
    tower.Number("patch_size", v.patch);
    tower.Number("spatial_merge_size", v.merge);
    tower.Number("out_hidden_size", v.out);
    tower.Number("num_position_embeddings", v.side * v.side);
    std::set<int64_t> indexes;
    for (int64_t i = 0; i < v.mergers; ++i) indexes.insert(2 * i);
    tower.List("deepstack_visual_indexes", indexes);
  } else {
    WriteSiglip(v, tower);
    if (c.family == "gemma3") tower.Flag("vision_use_head", v.pooling);
    if (c.family == "llama4") {
      tower.Number("vision_output_dim", v.out);
      tower.Number("projector_input_dim", v.projector);
      tower.Number("projector_output_dim", v.projector);
    }
  }
  json.Raw("vision_config", tower.Done());
  if (c.family != "mistral3") return;
  json.Number("spatial_merge_size", v.merge);
  json.Flag("multimodal_projector_bias", v.projector_bias);
}

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

void WriteLatent(const Config& c, Json& json) {
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
  if (!c.Indexed()) return;
  json.Number("index_n_heads", c.index_heads);
  json.Number("index_head_dim", c.index_dim);
  std::vector<std::string> words;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    words.push_back(c.shares_index.contains(layer) ? "shared" : "full");
  }
  json.Words("indexer_types", words);
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
  if (c.Is({"minimax_m2"})) return json.Number("num_local_experts", c.experts);
  json.Number("moe_intermediate_size", c.moe_intermediate);
  if (c.Is({"qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"})) {
    json.Number("num_experts", c.experts);
    json.Number("decoder_sparse_step", c.step);
    json.List("mlp_only_layers", c.dense_layers);
    if (c.Is({"qwen2_moe"})) json.Number("shared_expert_intermediate_size", c.shared_intermediate);
    return;
  }
  json.Number("n_routed_experts", c.experts);
  json.Number("n_shared_experts", c.shared_experts);
  if (c.lists_moe_layers) {
    std::vector<std::string> words;
    for (int64_t layer = 0; layer < c.layers; ++layer) {
      words.push_back(c.MoeLayer(layer) ? "sparse" : "dense");
    }
    return json.Words("mlp_layer_types", words);
  }
  json.Number("first_k_dense_replace", c.first_dense);
  if (c.Latent() && !c.Typed()) json.Number("moe_layer_freq", c.step);
}

}  // namespace

const std::vector<std::string>& KnownFamilies() {
  static const std::vector<std::string> families = {
      "llama",     "mistral",    "mixtral",    "qwen2",        "qwen2_moe",   "qwen3",
      "qwen3_moe", "gemma",      "gemma2",     "gemma3_text",  "deepseek_v2", "deepseek_v3",
      "kimi_k2",   "glm4_moe",   "gpt_oss",    "llama4_text",  "phi3",        "qwen2_5_vl",
      "seed_oss",  "ministral3", "minimax_m2", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite",
      "gemma3",    "llama4",     "mistral3",   "kimi_k25",     "qwen3_vl",    "qwen3_vl_moe",
      "granite",   "glm4",       "exaone4"};
  return families;
}

std::string Config::Text() const {
  static const std::map<std::string, std::string> within = {
      {"gemma3", "gemma3_text"}, {"llama4", "llama4_text"}, {"mistral3", "mistral"},
      {"kimi_k25", "kimi_k2"},   {"qwen3_vl", "qwen3"},     {"qwen3_vl_moe", "qwen3_vl_moe_text"}};
  const auto it = within.find(family);
  return it == within.end() ? family : it->second;
}

bool Config::Is(std::initializer_list<const char*> families) const {
  const std::string text = Text();
  return std::any_of(families.begin(), families.end(),
                     [&text](const char* name) { return text == name; });
}

bool Config::Describes(const std::string& scheme) const {
  if (scheme == "sglang") return !Wraps() && !Indexed() && !WholeNorms();
  if (scheme != "megatron") return true;
  if (Is({"glm4", "exaone4"})) return false;
  return !Wraps() || family == "mistral3" || family == "kimi_k25";
}

bool Config::MoeLayer(int64_t layer) const {
  if (layer >= layers || Is({"mixtral", "gpt_oss", "minimax_m2"})) return true;
  if (Is({"qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text"})) {
    return (layer + 1) % step == 0 && !dense_layers.contains(layer);
  }
  if (Is({"llama4_text"})) {
    return lists_moe_layers ? moe_layers.contains(layer) : (layer + 1) % step == 0;
  }
  if (Typed() && lists_moe_layers) return moe_layers.contains(layer);
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
  if (Is({"exaone4", "mistral", "ministral3", "mixtral", "phi3", "minimax_m2"}) || Latent())
    return false;
  return attention_bias;
}
bool Config::OBias() const {
  if (Is({"seed_oss"})) return output_bias;
  return QkvBias() && !Is({"qwen2", "qwen2_moe", "qwen2_5_vl", "glm4_moe", "glm4"});
}
bool Config::HeadNorms() const {
  return Is({"qwen3", "qwen3_moe", "qwen3_vl_moe_text", "gemma3_text", "exaone4"}) ||
         (Is({"glm4_moe"}) && use_qk_norm);
}

std::string ConfigJson(const Config& c) {
  Json outer, json;
  Json& whole = c.nests_text ? outer : json;
  whole.Text("model_type", c.family);
  if (c.Wraps()) {
    WriteTower(c, whole);
    if (c.family != "qwen3_vl") json.Text("model_type", c.Text());
  } else if (c.vision.depth > 0) {
    WriteVision(c.vision, whole);
  }
  json.Number("hidden_size", c.hidden);
  json.Number("num_hidden_layers", c.layers);
  json.Number("num_attention_heads", c.heads);
  json.Number("num_key_value_heads", c.kv_heads);
  if (c.says_head_dim) json.Number("head_dim", c.head_dim);
  const bool expert_size = c.Is({"mixtral", "gpt_oss", "llama4_text", "minimax_m2"});
  json.Number("intermediate_size", expert_size ? c.moe_intermediate : c.intermediate);
  json.Number("vocab_size", c.vocab);
  if (c.says_tied) json.Flag("tie_word_embeddings", c.tied);
  // Families without such biases have no such field, or ignore it.
  if (!c.Latent()) json.Flag("attention_bias", c.attention_bias);
  if (c.Is({"llama", "granite", "mistral", "qwen2", "qwen3", "seed_oss"}))
    json.Flag("mlp_bias", c.mlp_bias);
  if (c.Is({"seed_oss"})) json.Flag("attention_out_bias", c.output_bias);
  if (c.Is({"glm4_moe"})) json.Flag("use_qk_norm", c.use_qk_norm);
  if (c.Mixture()) WriteMixture(c, json);
  if (c.Latent()) WriteLatent(c, json);
  if (!c.nests_text) return json.Done();
  outer.Raw("text_config", json.Done());
  return outer.Done();
}

}  // namespace weightwire::family_oracle
