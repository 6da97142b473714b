#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "server/base/status.h"

/// `wwctl layout …`: what ranks should hold, offline.
namespace weightwire::cli {

struct LayoutRequest {
  std::string config_path;
  std::string spec;
  std::optional<uint32_t> rank;  ///< show: only this one; diff: the one observed, 0 if not given
  std::string tensor;            ///< show: shell pattern for local or canonical names
  std::string observed_path;     ///< diff
  bool json = false;
};
// Errors of all three: ReadConfig's and layout::LayoutFromScheme's; kInvalidArgument /
// kInvalidRequest for a rank that the layout does not have.

/// Layout classes with their ranks, tensors and bytes; with a rank or a pattern also every local
/// tensor with its pieces.
Result<std::string> ShowLayout(const LayoutRequest& request);

/// Compares a rank with what its process holds: JSON {name: [dtype, shape]} or {name: {"dtype",
/// "shape"}}, or a safetensors file. Differences are layout::Reconcile's failure; with `json` they
/// are also printed as {"equal": false, "reason", "tensor", "message", "remedy"}.
///   kInvalidArgument / kInvalidRequest  the file is none of these
Result<std::string> DiffLayout(const LayoutRequest& request);

/// Whether the spec is legal for the model, what it costs (bytes per rank, padding, copies of each
/// element) and what is worth knowing: replicated kv heads, padded rows, tensors that no rank
/// holds, ranks that hold much more than others.
Result<std::string> LintLayout(const LayoutRequest& request);

}  // namespace weightwire::cli
