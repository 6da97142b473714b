#pragma once

#include <string>
#include <string_view>

#include "server/layout/schemes/role_cutter.h"

namespace weightwire::layout {

/// Every tensor of the vision tower whole and under the checkpoint's name behind `at`: what
/// Megatron-Bridge holds on the first stage. Nothing for a model without one.
void AddWholeVision(RoleCutter& cutter, const std::string& at);

/// The tower as vLLM and SGLang cut it: rows of q, k and v by heads, gate and up stacked, proj,
/// down and the merger's second matrix by columns, the merger's first one by rows, the rest whole.
/// `qkv` names the fused module. Refuses the rank when heads or sizes do not divide.
void AddVisionShards(RoleCutter& cutter, std::string_view qkv);

}  // namespace weightwire::layout
