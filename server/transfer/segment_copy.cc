#include "server/transfer/segment_copy.h"

#include <algorithm>
#include <optional>
#include <string>

#include "server/base/checked.h"
#include "server/plan/quantization.h"

namespace weightwire::transfer {
namespace {

using kernels::Element;
using kernels::StridedBox;
using layout::DType;

Element OpaqueOf(int element_bytes) {
  switch (element_bytes) {
    case 1:
      return Element::kOpaque1;
    case 2:
      return Element::kOpaque2;
    case 4:
      return Element::kOpaque4;
    default:
      return Element::kOpaque8;
  }
}

std::optional<Element> FloatOf(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return Element::kBF16;
    case DType::kF16:
      return Element::kF16;
    case DType::kF32:
      return Element::kF32;
    default:
      return std::nullopt;
  }
}

// Equal dtypes are opaque, so that every dtype can be moved; only casts need to know the kind.
Element ElementOf(DType dtype, DType other) {
  if (dtype == other) return OpaqueOf(layout::ElementBytes(dtype));
  return FloatOf(dtype).value_or(OpaqueOf(layout::ElementBytes(dtype)));
}

// Runs along `stride` of a box whose other side is packed: there Normalize merges exactly the
// dimensions that are contiguous on the strided side.
std::vector<Run> RunsOf(const StridedBox& normalized, const int64_t* stride, uint64_t base,
                        int element_bytes) {
  int outer = normalized.ndim;
  int64_t run_elements = 1;
  if (outer > 0 && stride[outer - 1] == 1) run_elements = normalized.extent[--outer];
  const auto run_bytes = static_cast<uint64_t>(run_elements * element_bytes);
  std::vector<Run> runs;
  int64_t index[kernels::kMaxDims] = {};
  int64_t element = 0;
  while (true) {
    runs.push_back({base + static_cast<uint64_t>(element * element_bytes), run_bytes});
    int d = outer - 1;
    for (; d >= 0; --d) {
      element += stride[d];
      if (++index[d] < normalized.extent[d]) break;
      element -= stride[d] * normalized.extent[d];
      index[d] = 0;
    }
    if (d < 0) return runs;
  }
}

// One past the last element that a side touches; nullopt when it does not fit or is malformed.
std::optional<uint64_t> EndElement(const std::vector<int64_t>& extent, int64_t offset,
                                   const std::vector<int64_t>& stride) {
  if (stride.size() != extent.size() || offset < 0) return std::nullopt;
  uint64_t last = static_cast<uint64_t>(offset);
  for (size_t d = 0; d < stride.size(); ++d) {
    if (stride[d] < 0 || extent[d] < 1) return std::nullopt;
    const auto reach =
        CheckedMul(static_cast<uint64_t>(extent[d] - 1), static_cast<uint64_t>(stride[d]));
    const auto sum = reach ? CheckedAdd(last, *reach) : std::nullopt;
    if (!sum) return std::nullopt;
    last = *sum;
  }
  return CheckedAdd(last, 1);
}

bool SideFits(const std::vector<int64_t>& extent, int64_t offset,
              const std::vector<int64_t>& stride, DType dtype, uint64_t tensor_bytes) {
  const auto end = EndElement(extent, offset, stride);
  const auto bytes =
      end ? CheckedMul(*end, static_cast<uint64_t>(layout::ElementBytes(dtype))) : std::nullopt;
  return bytes && *bytes <= tensor_bytes;
}

bool SourceFits(const plan::CopyOp& op, uint64_t tensor_bytes) {
  return SideFits(plan::SourceExtent(op), op.source_offset, op.source_stride, op.source_dtype,
                  tensor_bytes);
}
bool TargetFits(const plan::CopyOp& op, uint64_t tensor_bytes) {
  return SideFits(op.extent, op.target_offset, op.target_stride, op.target_dtype, tensor_bytes);
}

Status CheckKind(const plan::CopyOp& op) {
  const bool known_dtypes = layout::DTypeFromNumber(static_cast<int>(op.source_dtype)) &&
                            layout::DTypeFromNumber(static_cast<int>(op.target_dtype));
  const bool fits = op.extent.size() <= kernels::kMaxDims && known_dtypes &&
                    op.source_stride.size() == op.extent.size() &&
                    op.target_stride.size() == op.extent.size() && CheckedProduct(op.extent);
  if (!fits) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "a copy of the plan is malformed (ndim, extents, strides or dtypes)");
  }
  if (const auto defect = plan::QuantizationDefect(op)) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "a copy of the plan " + *defect);
  }
  if (op.transform != plan::Transform::kElements) return OkStatus();
  if (!kernels::CastKnown(ElementOf(op.source_dtype, op.target_dtype),
                          ElementOf(op.target_dtype, op.source_dtype))) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "a copy of the plan casts in a way that no kernel knows");
  }
  return OkStatus();
}

// `first` becomes the source's first element.
kernels::QuantizeBox MatrixOf(const plan::CopyOp& op, const plan::Segment& segment,
                              int64_t* first) {
  const bool scales = op.transform == plan::Transform::kScales;
  const bool four_bits = layout::IsFourBit(op.rule);
  const int64_t packed = four_bits && !scales ? op.source_extent[1] / op.extent[1] : 1;
  *first = op.source_offset;
  // How codes come from their scales is the same however those are stored.
  const int scale_bytes = scales ? layout::ElementBytes(op.target_dtype) : 4;
  int64_t size[2];
  for (size_t d = 0; d < 2; ++d) {
    const int64_t step = scales ? op.block[d] : d == 1 ? packed : 1;
    const int64_t begin = segment.begin[d] * step;
    size[d] = std::min(segment.extent[d] * step, plan::SourceExtent(op)[d] - begin);
    *first += begin * op.source_stride[d];
  }
  return {size[0],
          size[1],
          op.block[0],
          op.block[1] * packed,
          {op.source_stride[0], op.source_stride[1]},
          {},
          {},
          four_bits ? kernels::ScaleKind::kF32
                    : kernels::ScaleKindOf(static_cast<int>(op.rule), scale_bytes)};
}

Status Outside(const char* side, uint32_t tensor) {
  return Status(
      Code::kInvalidArgument, Reason::kMemoryInvalid,
      std::string("a copy of the plan leaves ") + side + " tensor " + std::to_string(tensor));
}

Status ValidateSide(const plan::CopyOp& op, plan::Side side, const Binding& binding) {
  const bool is_source = side == plan::Side::kSource;
  const uint32_t tensor = is_source ? op.source_tensor : op.target_tensor;
  const bool fits =
      tensor < binding.size() && binding[tensor].region != nullptr &&
      (is_source ? SourceFits(op, binding[tensor].bytes) : TargetFits(op, binding[tensor].bytes));
  return fits ? OkStatus() : Outside(is_source ? "source" : "target", tensor);
}

Status ValidateOp(const plan::CopyOp& op, plan::Side side, const Binding& binding) {
  WW_RETURN_IF_ERROR(CheckKind(op));
  return ValidateSide(op, side, binding);
}

Status ValidateMade(const plan::CopyOp& op, const Binding& binding) {
  WW_RETURN_IF_ERROR(CheckKind(op));
  if (op.source_tensor == op.target_tensor) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "a copy of the plan writes what it reads");
  }
  WW_RETURN_IF_ERROR(ValidateSide(op, plan::Side::kSource, binding));
  return ValidateSide(op, plan::Side::kTarget, binding);
}

// All copies of a slice; the first that `check` refuses.
template <typename Check>
Status ForEachOp(const plan::RankSlice& slice, Check check) {
  const auto named = [&](const plan::CopyOp& op, bool made) {
    Status status = check(op, made);
    return status.ok() ? std::move(status) : std::move(status).AtTensor(TensorName(slice, op));
  };
  for (const plan::Stream& stream : slice.streams) {
    for (const plan::CopyOp& op : stream.ops) WW_RETURN_IF_ERROR(named(op, false));
  }
  for (const plan::CopyOp& op : slice.gathered.made) WW_RETURN_IF_ERROR(named(op, true));
  return OkStatus();
}

static_assert(kernels::FourBitKindOf(static_cast<int>(layout::kFirstFourBitRule)) ==
                  kernels::FourBitKind{} &&
              kernels::FourBitKindOf(static_cast<int>(layout::kLastFourBitRule)) ==
                  kernels::kLastFourBitKind);

}  // namespace

SegmentCopy CopyOf(const plan::CopyOp& op, const plan::Segment& segment) {
  SegmentCopy copy;
  copy.from = ElementOf(op.source_dtype, op.target_dtype);
  copy.to = ElementOf(op.target_dtype, op.source_dtype);
  copy.box.ndim = static_cast<int>(op.extent.size());
  int64_t source = op.source_offset;
  int64_t target = op.target_offset;
  for (size_t d = 0; d < op.extent.size(); ++d) {
    copy.box.extent[d] = segment.extent[d];
    copy.box.source_stride[d] = op.source_stride[d];
    copy.box.target_stride[d] = op.target_stride[d];
    source += segment.begin[d] * op.source_stride[d];
    target += segment.begin[d] * op.target_stride[d];
  }
  copy.target_offset = static_cast<uint64_t>(target * layout::ElementBytes(op.target_dtype));
  if (op.transform != plan::Transform::kElements) {
    copy.transform = op.transform;
    copy.from = *FloatOf(op.source_dtype);
    copy.matrix = MatrixOf(op, segment, &source);
    if (layout::IsFourBit(op.rule)) {
      copy.four_bits = kernels::FourBitKindOf(static_cast<int>(op.rule));
    }
  }
  copy.source_offset = static_cast<uint64_t>(source * layout::ElementBytes(op.source_dtype));
  return copy;
}

SegmentParts PartsOf(const plan::Stream& stream, const plan::StreamSchedule& schedule,
                     uint32_t index) {
  const plan::Segment& segment = schedule.segments[index];
  const plan::CopyOp& op = stream.ops[segment.op_index];
  return {op, segment, CopyOf(op, segment)};
}

bool SourceIsDirect(const SegmentCopy& copy, int64_t run_bytes_min) {
  if (copy.transform != plan::Transform::kElements || copy.from != copy.to) return false;
  const StridedBox box = kernels::Normalize(WithPackedTarget(copy.box));
  return kernels::SourceRunBytes(box, kernels::ElementBytes(copy.from)) >= run_bytes_min;
}
bool TargetIsDirect(const SegmentCopy& copy, int64_t run_bytes_min) {
  const StridedBox box = kernels::Normalize(WithPackedSource(copy.box));
  return kernels::TargetRunBytes(box, kernels::ElementBytes(copy.to)) >= run_bytes_min;
}

bool ReadAlike(const SegmentCopy& a, const SegmentCopy& b) {
  if (a.transform != plan::Transform::kElements || b.transform != plan::Transform::kElements)
    return false;
  const StridedBox x = kernels::Normalize(WithPackedTarget(a.box));
  const StridedBox y = kernels::Normalize(WithPackedTarget(b.box));
  return a.from == b.from && a.to == b.to && x.ndim == y.ndim &&
         std::equal(x.extent, x.extent + x.ndim, y.extent) &&
         std::equal(x.source_stride, x.source_stride + x.ndim, y.source_stride);
}

std::vector<Run> SourceRuns(const SegmentCopy& copy) {
  const StridedBox box = kernels::Normalize(WithPackedTarget(copy.box));
  return RunsOf(box, box.source_stride, copy.source_offset, kernels::ElementBytes(copy.from));
}
std::vector<Run> TargetRuns(const SegmentCopy& copy) {
  const StridedBox box = kernels::Normalize(WithPackedSource(copy.box));
  return RunsOf(box, box.target_stride, copy.target_offset, kernels::ElementBytes(copy.to));
}

std::string TensorName(const plan::RankSlice& slice, const plan::CopyOp& op) {
  if (op.canonical < slice.tensor_names.size()) return slice.tensor_names[op.canonical];
  return std::string("#").append(std::to_string(op.canonical));
}

Status ValidateSlice(const plan::RankSlice& slice, const Binding& binding) {
  return ForEachOp(slice, [&](const plan::CopyOp& op, bool made) {
    return made ? ValidateMade(op, binding) : ValidateOp(op, slice.side, binding);
  });
}

Status CheckBlocksFit(const plan::RankSlice& slice, int64_t segment_bytes_max) {
  return ForEachOp(slice, [&](const plan::CopyOp& op, bool) {
    const int64_t bytes = plan::LargestBlockBytes(op);
    if (bytes <= segment_bytes_max) return OkStatus();
    return Status(Code::kFailedPrecondition, Reason::kConfigInvalid,
                  "a block of " + std::to_string(bytes) + " fp8 codes does not fit a segment of " +
                      std::to_string(segment_bytes_max) + " bytes")
        .Remedy("raise segment_bytes_max on every agent to at least " + std::to_string(bytes));
  });
}

Status ValidateSourceSide(const plan::Stream& stream, const std::vector<uint64_t>& tensor_bytes) {
  for (const plan::CopyOp& op : stream.ops) {
    const bool fits =
        op.source_tensor < tensor_bytes.size() && SourceFits(op, tensor_bytes[op.source_tensor]);
    if (!fits) return Outside("source", op.source_tensor);
  }
  return OkStatus();
}

}  // namespace weightwire::transfer
