#pragma once

#include "server/layout/schemes/scheme_registry.h"

namespace weightwire::layout {

/// What each rank holds of LoRA adapters of rank R: `lora=R` in the spec, in place of the model's
/// own weights. The canonical space is PEFT's: for every linear layer that `targets=` names
/// "base_model.model.<module>.lora_A.weight" [R, in] and "….lora_B.weight" [out, R].
///
///   targets=q|k|v|o|gate|up|down|q_a|q_b|kv_a|kv_b   of attention and dense MLPs in the decoder's
///                  layers; default: those that the model has
///
/// Errors as in LayoutFromScheme; a target that the model lacks is kInvalidArgument /
/// kTensorMissing and named.
Result<ModelLayout> DeriveLora(const Model& model, const Scheme& scheme, const ParallelSpec& spec);

}  // namespace weightwire::layout
