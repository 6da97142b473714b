#pragma once

#include <span>
#include <string_view>

#include "server/layout/families/family.h"
#include "server/layout/scheme.h"

namespace weightwire::layout {

/// One way of cutting a model over ranks: a file in schemes/, listed in scheme_registry.cc.
struct Scheme {
  std::string_view name;
  std::span<const std::string_view> sizes;    ///< keys that `derive` reads from spec.sizes
  std::span<const std::string_view> options;  ///< keys that it reads from spec.options
  /// Ranks hold fp8 weights where the checkpoint does; otherwise they hold the model's dtype.
  bool quantized = false;
  /// Errors as in LayoutFromScheme.
  Result<ModelLayout> (*derive)(const Model& model, const ParallelSpec& spec);
};

Result<ModelLayout> DeriveFsdp(const Model& model, const ParallelSpec& spec);
Result<ModelLayout> DeriveHf(const Model& model, const ParallelSpec& spec);
Result<ModelLayout> DeriveMegatron(const Model& model, const ParallelSpec& spec);
Result<ModelLayout> DeriveSglang(const Model& model, const ParallelSpec& spec);
Result<ModelLayout> DeriveVllm(const Model& model, const ParallelSpec& spec);

}  // namespace weightwire::layout
