#pragma once

#include <string>
#include <string_view>

#include "server/layout/schemes/role_cutter.h"

namespace weightwire::layout {

/// Every tensor of the vision tower whole and under the checkpoint's name behind `at`, or for a
/// wrapper Megatron-Bridge's own: what that holds on the first stage. Nothing for a model without
/// one.
void AddWholeVision(RoleCutter& cutter, const std::string& at);

/// The tower as vLLM and SGLang cut it: rows of q, k and v by heads, gate and up stacked, proj,
/// down and the merger's second matrix by columns, the merger's first one by rows, the rest whole.
/// `qkv` names the fused module. Refuses the rank when heads or sizes do not divide.
void AddVisionShards(RoleCutter& cutter, std::string_view qkv);

/// A wrapper's tower as vLLM cuts it. Refuses the rank when heads or sizes do not divide.
void AddTowerShards(RoleCutter& cutter);

/// What a scheme says that does not describe `part` ("tower") of `family`.
Status Undescribed(std::string_view scheme, std::string_view part, std::string_view family);

}  // namespace weightwire::layout
