#pragma once

#include "server/layout/families/parts.h"

/// Words for families with linear attention: the gated delta rule or Mamba 2.
namespace weightwire::layout::linear {

inline constexpr SizeOf kHeads = [](const ModelConfig& c) { return c.linear.heads; };
inline constexpr SizeOf kHeadDim = [](const ModelConfig& c) { return c.linear.head_dim; };
inline constexpr SizeOf kHeadRows = [](const ModelConfig& c) { return c.linear.HeadRows(); };
inline constexpr SizeOf kKernel = [](const ModelConfig& c) { return c.linear.kernel; };
/// q, k and v; x, B and C.
inline constexpr SizeOf kChannels = [](const ModelConfig& c) {
  return 2 * c.linear.GroupRows() + c.linear.HeadRows();
};

inline constexpr IsPresent kAttention = [](const ModelConfig&, const LayerKind& l) {
  return l.mixer == Mixer::kAttention;
};
inline constexpr IsPresent kDelta = [](const ModelConfig&, const LayerKind& l) {
  return l.mixer == Mixer::kGatedDelta;
};
inline constexpr IsPresent kMamba = [](const ModelConfig&, const LayerKind& l) {
  return l.mixer == Mixer::kMamba;
};
inline constexpr IsPresent kMambaWithConvBias = [](const ModelConfig& c, const LayerKind& l) {
  return l.mixer == Mixer::kMamba && c.linear.conv_bias;
};

/// The same tensor in layers that `present` names.
constexpr TensorTemplate Where(IsPresent present, TensorTemplate tensor) {
  tensor.present = present;
  return tensor;
}
constexpr TensorTemplate Conv(std::string_view name, IsPresent present) {
  return {name,
          {kChannels, parts::kOne, kKernel},
          {Part{.role = Role::kLinearConv, .column_dim = 2}},
          present};
}

/// Refuses config.json where flag `key` is set.
inline Status CheckUnset(const Json& json, const char* key) {
  WW_ASSIGN_OR_STATUS(const bool set, ReadFlagOr(json, key, false));
  if (!set) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                std::string("config.json has ") + key +
                    ", which no release uses and this family does not describe")
      .Remedy("send explicit layouts");
}

}  // namespace weightwire::layout::linear
