#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "server/layout/scheme.h"
#include "server/layout/types.h"

/// Recorded engine loaders: what an engine's own `load_weights` does with each checkpoint tensor.
namespace weightwire::layout {

/// One view that the loader takes: {"narrow", {dim, start, length}}, {"unsqueeze", {dim}},
/// {"unbind", {dim = 0}} followed by {"__getitem__", {index}}, {"select", {dim, index}},
/// {"transpose", {dim, dim}} or {"t", {}}. A `__getitem__` without unbind takes an index of
/// dimension 0. Dimensions may count from the end, as in torch.
struct TraceOp {
  std::string name;
  std::vector<int64_t> arguments;
  friend bool operator==(const TraceOp&, const TraceOp&) = default;
};

/// One copy: checkpoint tensor `source`, viewed through `ops`, lands in the engine's parameter
/// `param` as a block of `shape` and `stride` at element `offset` of its storage.
struct TraceRow {
  std::string source;
  std::vector<TraceOp> ops;
  std::string param;
  int64_t offset = 0;
  Shape shape;
  std::vector<int64_t> stride;
  DType dtype = DType::kBF16;  ///< of the parameter
  friend bool operator==(const TraceRow&, const TraceRow&) = default;
};

struct EngineTrace {
  std::string config_json;                   ///< the engine's model config; "{}" when not recorded
  std::vector<std::vector<TraceRow>> ranks;  ///< by tensor-parallel rank
};

/// Reads {"config": {…}, "ranks": [{"rank": 0, "copies": [{"src", "ops", "param", "offset",
/// "shape", "stride", "dtype"}]}]}; every rank from 0 on once, in any order; other members are
/// ignored.
///   kInvalidArgument / kInvalidRequest  anything else
Result<EngineTrace> ParseTrace(std::string_view json);

/// Turns the rows of one rank into explicit pieces. Parameters come in the order in which the
/// loader first filled them, pieces in the order of the rows.
///
/// The rows do not tell a parameter's shape, only what they fill: E = the last filled element + 1.
/// When all rows of the parameter have the same strides s_0 > s_1 > … > 1, each a divisor of the
/// one before, it gets the row-major shape with those strides whose dimension 0 just covers E.
/// Otherwise it gets the flat shape [E]. So padding behind the last row is not part of the local
/// tensor, and a parameter that is padding only is absent: memory may be bound longer than the
/// layout needs.
///
///   kInvalidArgument / kTensorMissing   a row's source is not in `canonical`; names it
///   kInvalidArgument / kInvalidRequest  an operation is unknown or does not fit the view, or a row
///                                       is malformed
///   kInvalidArgument / kShapeMismatch   a row's shape is not that of its view
///   kInvalidArgument / kDtypeMismatch   rows of one parameter differ in dtype
///   kInvalidArgument / kShapeOverflow   a parameter's extent does not fit int64
///   and what ValidateRank says of the result
Result<RankLayout> LayoutFromTrace(const CanonicalSpace& canonical,
                                   const std::vector<TraceRow>& rows);

/// The canonical space in the shapes under which a Hugging Face checkpoint stores its tensors,
/// which is what loaders see. Errors: CanonicalFromConfig's.
Result<CanonicalSpace> StoredFromConfig(std::string_view config_json);

/// The canonical space of a model that no family describes: the tensors of the checkpoint that its
/// loader was fed, whichever of them this rank's loader takes. A head that config.json ties to the
/// embedding is none of the model's, whatever the file has (CheckTie).
///   kInvalidArgument / kInvalidRequest  config.json is not JSON, or says two things of the tie;
///   and
///                                       what Validate says of the result
Result<CanonicalSpace> CanonicalFromCheckpoint(std::string_view config_json,
                                               const std::vector<ObservedTensor>& checkpoint);

/// Gives traced parameters the shapes and the order in which their process binds them. What the
/// loader never filled (buffers) stays, without pieces.
///   kFailedPrecondition / kTensorMissing  a traced parameter was not observed
///   kFailedPrecondition / kDtypeMismatch  it was, with another dtype than the trace says
///   kFailedPrecondition / kShapeMismatch  it is too small for what the loader filled
Result<RankLayout> BindTrace(RankLayout traced, const std::vector<ObservedTensor>& observed);

/// Where the trace and a scheme disagree on what the rank holds of the checkpoint: one line for
/// each canonical tensor (at most 20, then a count), whatever the parameters are called. Empty:
/// nowhere.
std::vector<std::string> CompareTrace(const CanonicalSpace& canonical, const RankLayout& traced,
                                      const RankLayout& scheme);

}  // namespace weightwire::layout
