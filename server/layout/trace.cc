#include "server/layout/trace.h"

#include <algorithm>
#include <unordered_map>

#include "server/layout/trace_view.h"

namespace weightwire::layout {
namespace {

Status Invalid(Reason reason, std::string message) {
  return {Code::kInvalidArgument, reason, std::move(message)};
}

Result<Piece> PieceOf(const CanonicalSpace& canonical, const TraceRow& row) {
  const std::optional<uint32_t> tensor = canonical.Find(row.source);
  if (!tensor) {
    return Fail(Invalid(Reason::kTensorMissing, "the loader reads \"" + row.source.substr(0, 256) +
                                                    "\", which is no tensor of the model"));
  }
  TraceView view(canonical.tensors[*tensor]);
  for (const TraceOp& op : row.ops) WW_FAIL_IF_ERROR(view.Apply(op));
  if (!view.IsTensor() || row.stride.size() != row.shape.size()) {
    return Fail(Invalid(Reason::kInvalidRequest, "a row's view or stride is incomplete"));
  }
  if (view.ViewShape() != row.shape) {
    return Fail(
        Invalid(Reason::kShapeMismatch, "a row's shape is not that of its view of " + row.source));
  }
  return Piece{*tensor, view.box(), row.offset, view.CanonicalStrides(row.stride)};
}

/// The last element that the row fills, plus one; nullopt when it does not fit or is negative.
std::optional<int64_t> EndOf(const TraceRow& row) {
  int64_t end = 0;
  if (row.offset < 0 || __builtin_add_overflow(row.offset, int64_t{1}, &end)) return std::nullopt;
  for (size_t d = 0; d < row.shape.size(); ++d) {
    int64_t span = 0;
    if (row.stride[d] < 1 || __builtin_mul_overflow(row.shape[d] - 1, row.stride[d], &span) ||
        __builtin_add_overflow(end, span, &end)) {
      return std::nullopt;
    }
  }
  return end;
}

bool IsRowMajor(const std::vector<int64_t>& strides) {
  if (strides.empty() || strides.back() != 1) return false;
  for (size_t d = 1; d < strides.size(); ++d) {
    if (strides[d - 1] <= strides[d] || strides[d - 1] % strides[d] != 0) return false;
  }
  return true;
}

/// What the rows of one parameter have told so far.
struct Parameter {
  std::vector<int64_t> stride;
  bool same_strides = true;
  int64_t end = 0;
};

Shape ShapeOf(const Parameter& parameter) {
  const auto& stride = parameter.stride;
  if (!parameter.same_strides || !IsRowMajor(stride)) return {parameter.end};
  Shape shape(stride.size());
  shape[0] = (parameter.end - 1) / stride[0] + 1;
  for (size_t d = 1; d < stride.size(); ++d) shape[d] = stride[d - 1] / stride[d];
  return shape;
}

/// Gathers rows by parameter.
class Collector {
 public:
  explicit Collector(const CanonicalSpace& canonical) : canonical_(canonical) {}

  Status Add(const TraceRow& row) {
    WW_ASSIGN_OR_STATUS(Piece piece, PieceOf(canonical_, row));
    const std::optional<int64_t> end = EndOf(row);
    if (!end) {
      return Invalid(Reason::kShapeOverflow,
                     "a row's offset or strides do not fit the parameter's storage");
    }
    const auto [it, is_new] = index_.emplace(row.param, layout_.tensors.size());
    if (is_new) {
      layout_.tensors.push_back({row.param, row.dtype, {}, {}});
      parameters_.push_back({row.stride, true, 0});
    }
    LocalTensor& local = layout_.tensors[it->second];
    Parameter& parameter = parameters_[it->second];
    if (local.dtype != row.dtype) {
      return Invalid(Reason::kDtypeMismatch, "rows of one parameter differ in dtype");
    }
    parameter.same_strides = parameter.same_strides && parameter.stride == row.stride;
    parameter.end = std::max(parameter.end, *end);
    local.pieces.push_back(std::move(piece));
    return OkStatus();
  }

  RankLayout Finish() && {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      layout_.tensors[i].shape = ShapeOf(parameters_[i]);
    }
    return std::move(layout_);
  }

 private:
  const CanonicalSpace& canonical_;
  RankLayout layout_;
  std::vector<Parameter> parameters_;
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace

Result<RankLayout> LayoutFromTrace(const CanonicalSpace& canonical,
                                   const std::vector<TraceRow>& rows) {
  Collector collector(canonical);
  for (const TraceRow& row : rows) {
    Status status = collector.Add(row);
    if (!status.ok()) return Fail(std::move(status).AtTensor(row.param));
  }
  RankLayout layout = std::move(collector).Finish();
  WW_FAIL_IF_ERROR(ValidateRank(canonical, layout));
  return layout;
}

}  // namespace weightwire::layout
