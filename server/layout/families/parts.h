#pragma once

#include "server/layout/families/family.h"

/// Words that families are written in: sizes, conditions, and the tensors that decoders of the
/// Llama line share. A family's file lists what is its own.
namespace weightwire::layout::parts {

// ---- sizes ----
inline constexpr SizeOf kVocab = [](const ModelConfig& c) { return c.vocab; };
inline constexpr SizeOf kHidden = [](const ModelConfig& c) { return c.hidden; };
inline constexpr SizeOf kTwiceHidden = [](const ModelConfig& c) { return 2 * c.hidden; };
inline constexpr SizeOf kHeads = [](const ModelConfig& c) { return c.heads; };
inline constexpr SizeOf kHeadDim = [](const ModelConfig& c) { return c.head_dim; };
inline constexpr SizeOf kQRows = [](const ModelConfig& c) { return c.heads * c.head_dim; };
inline constexpr SizeOf kKvRows = [](const ModelConfig& c) { return c.kv_heads * c.head_dim; };
inline constexpr SizeOf kIntermediate = [](const ModelConfig& c) { return c.intermediate; };
inline constexpr SizeOf kExperts = [](const ModelConfig& c) { return c.experts; };
inline constexpr SizeOf kMoeIntermediate = [](const ModelConfig& c) { return c.moe_intermediate; };
inline constexpr SizeOf kTwiceMoeIntermediate = [](const ModelConfig& c) {
  return 2 * c.moe_intermediate;
};
inline constexpr SizeOf kSharedIntermediate = [](const ModelConfig& c) {
  return c.shared_intermediate;
};
inline constexpr SizeOf kOne = [](const ModelConfig&) { return int64_t{1}; };
inline constexpr SizeOf kTwo = [](const ModelConfig&) { return int64_t{2}; };

// ---- conditions ----
inline constexpr IsPresent kAlways = [](const ModelConfig&, const LayerKind&) { return true; };
inline constexpr IsPresent kUntied = [](const ModelConfig& c, const LayerKind&) { return !c.tied; };
inline constexpr IsPresent kWithAttentionBias = [](const ModelConfig& c, const LayerKind&) {
  return c.attention_bias;
};
inline constexpr IsPresent kWithQkNorm = [](const ModelConfig& c, const LayerKind&) {
  return c.qk_norm;
};
inline constexpr IsPresent kDense = [](const ModelConfig&, const LayerKind& l) { return !l.moe; };
inline constexpr IsPresent kDenseWithBias = [](const ModelConfig& c, const LayerKind& l) {
  return !l.moe && c.mlp_bias;
};
inline constexpr IsPresent kMoe = [](const ModelConfig&, const LayerKind& l) { return l.moe; };
inline constexpr IsPresent kMoeWithShared = [](const ModelConfig& c, const LayerKind& l) {
  return l.moe && c.shared_intermediate > 0;
};
inline constexpr IsPresent kMoeWithCorrection = [](const ModelConfig& c, const LayerKind& l) {
  return l.moe && c.router_correction;
};
inline constexpr IsPresent kMtp = [](const ModelConfig&, const LayerKind& l) { return l.mtp; };

// ---- shapes of templates ----
constexpr TensorTemplate Vector(Role role, std::string_view name, SizeOf rows,
                                IsPresent present = kAlways) {
  return {name, {rows}, {Part{.role = role}}, present};
}
constexpr TensorTemplate Matrix(Role role, std::string_view name, SizeOf rows, SizeOf columns,
                                IsPresent present = kAlways) {
  return {name, {rows, columns}, {Part{.role = role}}, present};
}

/// Of an MTP layer, under a name without a number.
constexpr TensorTemplate OfMtp(TensorTemplate tensor) {
  tensor.present = kMtp;
  tensor.mtp = true;
  return tensor;
}

constexpr TensorTemplate When(IsPresent present, TensorTemplate tensor) {
  tensor.present = present;
  return tensor;
}

// ---- outside layers ----
inline constexpr TensorTemplate kEmbed =
    Matrix(Role::kEmbed, "model.embed_tokens.weight", kVocab, kHidden);
inline constexpr TensorTemplate kLmHead =
    Matrix(Role::kLmHead, "lm_head.weight", kVocab, kHidden, kUntied);
inline constexpr TensorTemplate kFinalNorm = Vector(Role::kFinalNorm, "model.norm.weight", kHidden);

// ---- norms ----
inline constexpr TensorTemplate kInputNorm =
    Vector(Role::kInputNorm, "model.layers.{layer}.input_layernorm.weight", kHidden);
inline constexpr TensorTemplate kPostAttentionNorm = Vector(
    Role::kPostAttentionNorm, "model.layers.{layer}.post_attention_layernorm.weight", kHidden);

// ---- attention ----
inline constexpr TensorTemplate kQWeight =
    Matrix(Role::kQWeight, "model.layers.{layer}.self_attn.q_proj.weight", kQRows, kHidden);
inline constexpr TensorTemplate kKWeight =
    Matrix(Role::kKWeight, "model.layers.{layer}.self_attn.k_proj.weight", kKvRows, kHidden);
inline constexpr TensorTemplate kVWeight =
    Matrix(Role::kVWeight, "model.layers.{layer}.self_attn.v_proj.weight", kKvRows, kHidden);
inline constexpr TensorTemplate kOWeight =
    Matrix(Role::kOWeight, "model.layers.{layer}.self_attn.o_proj.weight", kHidden, kQRows);
constexpr TensorTemplate QBias(IsPresent present) {
  return Vector(Role::kQBias, "model.layers.{layer}.self_attn.q_proj.bias", kQRows, present);
}
constexpr TensorTemplate KBias(IsPresent present) {
  return Vector(Role::kKBias, "model.layers.{layer}.self_attn.k_proj.bias", kKvRows, present);
}
constexpr TensorTemplate VBias(IsPresent present) {
  return Vector(Role::kVBias, "model.layers.{layer}.self_attn.v_proj.bias", kKvRows, present);
}
constexpr TensorTemplate OBias(IsPresent present) {
  return Vector(Role::kOBias, "model.layers.{layer}.self_attn.o_proj.bias", kHidden, present);
}
constexpr TensorTemplate QNorm(IsPresent present) {
  return Vector(Role::kQNorm, "model.layers.{layer}.self_attn.q_norm.weight", kHeadDim, present);
}
constexpr TensorTemplate KNorm(IsPresent present) {
  return Vector(Role::kKNorm, "model.layers.{layer}.self_attn.k_norm.weight", kHeadDim, present);
}

// ---- dense MLP ----
inline constexpr TensorTemplate kGateWeight = Matrix(
    Role::kGateWeight, "model.layers.{layer}.mlp.gate_proj.weight", kIntermediate, kHidden, kDense);
inline constexpr TensorTemplate kUpWeight = Matrix(
    Role::kUpWeight, "model.layers.{layer}.mlp.up_proj.weight", kIntermediate, kHidden, kDense);
inline constexpr TensorTemplate kDownWeight = Matrix(
    Role::kDownWeight, "model.layers.{layer}.mlp.down_proj.weight", kHidden, kIntermediate, kDense);

// ---- mixture of experts, as most families name it ----
inline constexpr TensorTemplate kRouter =
    Matrix(Role::kRouter, "model.layers.{layer}.mlp.gate.weight", kExperts, kHidden, kMoe);
inline constexpr TensorTemplate kExpertGate =
    Matrix(Role::kExpertGate, "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
           kMoeIntermediate, kHidden, kMoe);
inline constexpr TensorTemplate kExpertUp =
    Matrix(Role::kExpertUp, "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
           kMoeIntermediate, kHidden, kMoe);
inline constexpr TensorTemplate kExpertDown =
    Matrix(Role::kExpertDown, "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", kHidden,
           kMoeIntermediate, kMoe);

/// All experts as one tensor with inputs first, gate before up in the last dimension.
constexpr TensorTemplate GateUpExperts(std::string_view name) {
  const Part gate = {
      .role = Role::kExpertGate, .row_dim = 2, .column_dim = 1, .expert_dim = 0, .slices = 2};
  Part up = gate;
  up.role = Role::kExpertUp;
  up.slice = 1;
  return {.name = name,
          .shape = {kExperts, kHidden, kTwiceMoeIntermediate},
          .parts = {gate, up},
          .present = kMoe};
}
constexpr TensorTemplate DownExperts(std::string_view name) {
  return {
      .name = name,
      .shape = {kExperts, kMoeIntermediate, kHidden},
      .parts = {Part{.role = Role::kExpertDown, .row_dim = 2, .column_dim = 1, .expert_dim = 0}},
      .present = kMoe};
}

/// The same with outputs first, gate before up.
constexpr TensorTemplate GateUpExpertRows(std::string_view name) {
  const Part gate = {
      .role = Role::kExpertGate, .row_dim = 1, .column_dim = 2, .expert_dim = 0, .slices = 2};
  Part up = gate;
  up.role = Role::kExpertUp;
  up.slice = 1;
  return {.name = name,
          .shape = {kExperts, kTwiceMoeIntermediate, kHidden},
          .parts = {gate, up},
          .present = kMoe};
}
constexpr TensorTemplate DownExpertRows(std::string_view name) {
  return {
      .name = name,
      .shape = {kExperts, kHidden, kMoeIntermediate},
      .parts = {Part{.role = Role::kExpertDown, .row_dim = 1, .column_dim = 2, .expert_dim = 0}},
      .present = kMoe};
}

}  // namespace weightwire::layout::parts
