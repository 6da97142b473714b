#include "server/agent/plan_bounds.h"

#include <set>
#include <string>
#include <vector>

#include "server/base/checked.h"
#include "server/plan/quantization.h"

namespace weightwire::agent {
namespace {

using layout::DType;

Status Refuse(Reason reason, std::string message) {
  return Status(Code::kInvalidArgument, reason, std::move(message));
}

bool IsCastFloat(DType dtype) {
  return dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF32;
}

bool StridesWellFormed(const std::vector<int64_t>& extent, const std::vector<int64_t>& stride) {
  if (stride.size() != extent.size()) return false;
  for (size_t d = 0; d < extent.size(); ++d) {
    if (stride[d] < (extent[d] > 1 ? 1 : 0)) return false;
  }
  return true;
}

Status CheckForm(const plan::CopyOp& op, size_t tensor_names) {
  if (op.canonical >= tensor_names) {
    return Refuse(Reason::kTensorMissing, "op names a canonical tensor that the plan lacks");
  }
  if (op.extent.size() > static_cast<size_t>(layout::kMaxDims)) {
    return Refuse(Reason::kInvalidRequest, "op has too many dimensions");
  }
  for (int64_t extent : op.extent) {
    if (extent < 1) return Refuse(Reason::kInvalidRequest, "op has an empty extent");
  }
  if (const auto defect = plan::QuantizationDefect(op)) {
    return Refuse(Reason::kInvalidRequest, "op " + *defect);
  }
  if (op.source_offset < 0 || op.target_offset < 0 ||
      !StridesWellFormed(plan::SourceExtent(op), op.source_stride) ||
      !StridesWellFormed(op.extent, op.target_stride)) {
    return Refuse(Reason::kInvalidRequest, "op has a malformed offset or stride");
  }
  if (op.transform == plan::Transform::kElements && op.source_dtype != op.target_dtype &&
      !(IsCastFloat(op.source_dtype) && IsCastFloat(op.target_dtype))) {
    return Refuse(Reason::kDtypeMismatch,
                  "no cast from " + std::string(layout::DTypeName(op.source_dtype)) + " to " +
                      std::string(layout::DTypeName(op.target_dtype)));
  }
  return OkStatus();
}

/// Index of the last element that the op touches on one side; nullopt when it does not fit.
std::optional<uint64_t> LastElement(const std::vector<int64_t>& extent, int64_t offset,
                                    const std::vector<int64_t>& stride) {
  std::optional<uint64_t> last = static_cast<uint64_t>(offset);
  for (size_t d = 0; d < extent.size() && last; ++d) {
    auto span = CheckedMul(static_cast<uint64_t>(extent[d] - 1), static_cast<uint64_t>(stride[d]));
    last = span ? CheckedAdd(*last, *span) : std::nullopt;
  }
  return last;
}

/// The rank's tensors, and behind them what it gathers, which none of its pieces is in.
class Tensors {
 public:
  Tensors(const layout::RankLayout& layout, const plan::GatherBuffer& gathered)
      : layout_(layout),
        gathers_(gathered.elements > 0),
        gathered_{"what is gathered", gathered.dtype, {gathered.elements}, {}} {}
  size_t size() const { return layout_.tensors.size() + gathers_; }
  bool IsGathered(uint32_t index) const { return gathers_ && index == layout_.tensors.size(); }
  const layout::LocalTensor& operator[](uint32_t index) const {
    return index < layout_.tensors.size() ? layout_.tensors[index] : gathered_;
  }

 private:
  const layout::RankLayout& layout_;
  const bool gathers_;
  const layout::LocalTensor gathered_;
};

Status CheckOurSide(const plan::CopyOp& op, plan::Side side, const Tensors& tensors) {
  const bool source = side == plan::Side::kSource;
  const uint32_t index = source ? op.source_tensor : op.target_tensor;
  if (index >= tensors.size()) {
    return Refuse(Reason::kTensorMissing, "op names local tensor " + std::to_string(index) +
                                              " of " + std::to_string(tensors.size()));
  }
  const layout::LocalTensor& tensor = tensors[index];
  const DType dtype = source ? op.source_dtype : op.target_dtype;
  if (dtype != tensor.dtype) {
    return Refuse(Reason::kDtypeMismatch,
                  "the plan takes " + std::string(layout::DTypeName(dtype)) + ", the tensor is " +
                      std::string(layout::DTypeName(tensor.dtype)))
        .AtTensor(tensor.name);
  }
  const auto elements = CheckedProduct(tensor.shape);
  const auto last = source ? LastElement(plan::SourceExtent(op), op.source_offset, op.source_stride)
                           : LastElement(op.extent, op.target_offset, op.target_stride);
  if (!elements || !last) {
    return Refuse(Reason::kShapeOverflow, "op does not fit 64 bits").AtTensor(tensor.name);
  }
  if (*last >= static_cast<uint64_t>(*elements)) {
    return Refuse(Reason::kShapeMismatch, "op reaches element " + std::to_string(*last) +
                                              " of a tensor of " + std::to_string(*elements))
        .AtTensor(tensor.name);
  }
  return OkStatus();
}

/// Bytes of the op on the wire; nullopt when they do not fit.
std::optional<uint64_t> CheckedWireBytes(const plan::CopyOp& op) {
  const auto elements = CheckedProduct(op.extent);
  if (!elements) return std::nullopt;
  return CheckedMul(static_cast<uint64_t>(*elements),
                    static_cast<uint64_t>(layout::ElementBytes(op.target_dtype)));
}

Status CheckStream(const plan::Stream& stream, const plan::RankSlice& slice,
                   const Tensors& tensors) {
  const uint32_t ours = slice.side == plan::Side::kSource ? stream.source_rank : stream.target_rank;
  if (ours != slice.rank) return Refuse(Reason::kInvalidRequest, "stream of another rank");
  uint64_t bytes = 0;
  for (const plan::CopyOp& op : stream.ops) {
    WW_RETURN_IF_ERROR(CheckForm(op, slice.tensor_names.size()));
    WW_RETURN_IF_ERROR(CheckOurSide(op, slice.side, tensors));
    const auto op_bytes = CheckedWireBytes(op);
    const auto sum = op_bytes ? CheckedAdd(bytes, *op_bytes) : std::nullopt;
    if (!sum) return Refuse(Reason::kShapeOverflow, "stream does not fit 64 bits");
    bytes = *sum;
  }
  if (stream.bytes < 0 || bytes != static_cast<uint64_t>(stream.bytes)) {
    return Refuse(Reason::kInvalidRequest, "stream says " + std::to_string(stream.bytes) +
                                               " bytes, its ops have " + std::to_string(bytes));
  }
  return OkStatus();
}

Status CheckMade(const plan::CopyOp& op, size_t tensor_names, const Tensors& tensors) {
  WW_RETURN_IF_ERROR(CheckForm(op, tensor_names));
  if (op.transform == plan::Transform::kElements || !tensors.IsGathered(op.source_tensor) ||
      tensors.IsGathered(op.target_tensor)) {
    return Refuse(Reason::kInvalidRequest, "op makes nothing of what is gathered");
  }
  WW_RETURN_IF_ERROR(CheckOurSide(op, plan::Side::kSource, tensors));
  return CheckOurSide(op, plan::Side::kTarget, tensors);
}

Status CheckGathered(const plan::RankSlice& slice, const Tensors& tensors) {
  const plan::GatherBuffer& gathered = slice.gathered;
  if (gathered == plan::GatherBuffer{}) return OkStatus();
  if (slice.side != plan::Side::kTarget || gathered.elements < 1 || gathered.made.empty() ||
      !IsCastFloat(gathered.dtype)) {
    return Refuse(Reason::kInvalidRequest, "what is gathered is malformed");
  }
  if (!layout::StorageBytes(gathered.dtype, std::vector<int64_t>{gathered.elements})) {
    return Refuse(Reason::kShapeOverflow, "what is gathered does not fit 64 bits");
  }
  for (const plan::CopyOp& op : gathered.made) {
    WW_RETURN_IF_ERROR(CheckMade(op, slice.tensor_names.size(), tensors));
  }
  return OkStatus();
}

}  // namespace

Status CheckSlice(const plan::RankSlice& slice, PlanId plan, plan::Side side, uint32_t rank,
                  const layout::RankLayout& layout) {
  if (slice.plan != plan || slice.side != side || slice.rank != rank) {
    return Refuse(Reason::kInvalidRequest,
                  "a slice of another plan, side or rank than " + plan.ToHex() + " was sent");
  }
  const Tensors tensors(layout, slice.gathered);
  if (Status status = CheckGathered(slice, tensors); !status.ok()) {
    return Status(status.code(), status.reason(), "plan " + plan.ToHex() + ": " + status.message())
        .AtTensor(status.tensor())
        .Remedy("the plan does not belong to this layout; register again");
  }
  std::set<uint32_t> ids;
  for (const plan::Stream& stream : slice.streams) {
    Status status = CheckStream(stream, slice, tensors);
    if (status.ok() && !ids.insert(stream.id).second) {
      status = Refuse(Reason::kInvalidRequest, "stream occurs twice");
    }
    if (!status.ok()) {
      const std::string where =
          "plan " + plan.ToHex() + ", stream " + std::to_string(stream.id) + ": ";
      return Status(status.code(), status.reason(), where + status.message())
          .AtTensor(status.tensor())
          .Remedy("the plan does not belong to this layout; register again");
    }
  }
  return OkStatus();
}

}  // namespace weightwire::agent
