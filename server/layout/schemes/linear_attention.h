#pragma once

#include <string>
#include <string_view>

#include "server/layout/scheme.h"
#include "server/layout/schemes/role_cutter.h"
#include "server/layout/types.h"

namespace weightwire::layout {

/// Linear attention is cut by heads: each part of its fused matrices, and of the channels of its
/// convolution, gives a rank one chunk; with q, k or B, C go whole groups of heads. All functions
/// add nothing for a layer that has attention of another kind.
///
/// As vLLM and SGLang name and fuse it; `text` is in front of the text model's names.
void AddEngineLinear(RoleCutter& cutter, std::string_view text, int64_t layer);
/// As Megatron-core names and fuses it; `at` is the prefix of the layer, with the dot at its end.
/// `flat_conv`: Mamba's convolution is no module of its own.
void AddMegatronLinear(RoleCutter& cutter, const std::string& at, bool flat_conv, int64_t layer);

/// Heads and groups divide by tp. `shares_group`: a single group of Mamba may belong to every rank
/// instead. kInvalidArgument / kShapeMismatch, naming a tensor that cannot be cut.
Status CheckLinearParallel(const Model& model, int64_t tp, bool shares_group);

/// What a process holds of a model may be computed from the checkpoint, so that no copy makes it:
/// the layout must leave such tensors out. kInvalidArgument / kUnknownModel, naming the first.
Status RefuseComputed(const Model& model, const ParallelSpec& spec, const ModelLayout& layout);

}  // namespace weightwire::layout
