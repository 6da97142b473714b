#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/checkpoint/file_read.h"
#include "client/checkpoint/layout_json.h"
#include "client/checkpoint/weightwire_checkpoint.h"
#include "kernels/four_bit.h"
#include "kernels/kernels.h"
#include "kernels/quantize.h"
#include "server/delta/coder.h"
#include "server/layout/config_in_format.h"
#include "server/layout/scheme.h"
#include "server/plan/plan.h"
#include "server/plan/plan_bytes.h"

namespace weightwire::checkpoint {
namespace {

static_assert(WW_CHECKPOINT_DIMS_MAX == kernels::kMaxDims);
static_assert(WW_CHECKPOINT_DIMS_MAX == layout::kMaxDims);

thread_local Status last;
thread_local std::string last_answer;

int32_t Keep(Status status) {
  last = std::move(status);
  return static_cast<int32_t>(last.code());
}

/// Runs work() → Result<std::string> and keeps what it says.
template <typename Work>
int32_t Answer(ww_checkpoint_answer* answer, Work work) {
  try {
    Result<std::string> made = work();
    if (!made.has_value()) return Keep(std::move(made).error());
    last_answer = *std::move(made);
    *answer = {last_answer.data(), last_answer.size()};
    return Keep(OkStatus());
  } catch (const std::exception& failure) {  // no memory; a name that is no UTF-8
    return Keep(Status(Code::kResourceExhausted, Reason::kLimitExceeded, failure.what()));
  }
}

/// The layout, with nothing on other ranks than `rank`.
Result<layout::ModelLayout> LayoutOf(const char* config, const char* spec, uint32_t rank) {
  WW_ASSIGN(const layout::ParallelSpec parsed, layout::ParseParallelSpec(spec));
  WW_ASSIGN(layout::ModelLayout made, layout::LayoutFromScheme(config, parsed));
  if (rank == WW_CHECKPOINT_ALL_RANKS) return made;
  if (rank >= made.ranks.size()) {
    return Fail(
        Status(Code::kInvalidArgument, Reason::kInvalidRequest,
               std::string(spec) + " has ranks 0 to " + std::to_string(made.ranks.size() - 1))
            .AtRank(std::to_string(rank)));
  }
  for (size_t other = 0; other < made.ranks.size(); ++other) {
    if (other != rank) made.ranks[other].tensors.clear();
  }
  return made;
}

Result<std::string> Layout(const char* config, const char* spec, uint32_t rank, bool pieces) {
  WW_ASSIGN(const layout::ModelLayout made, LayoutOf(config, spec, rank));
  Json tensors = Json::array();
  for (uint32_t r = 0; r < made.ranks.size(); ++r) {
    for (const layout::LocalTensor& tensor : made.ranks[r].tensors) {
      tensors.push_back(pieces ? TensorJson(made, r, tensor) : SpecJson(r, tensor));
    }
  }
  return Json{{"ranks", made.ranks.size()}, {"tensors", std::move(tensors)}}.dump();
}

/// Who loads a checkpoint copies bits: ww_checkpoint_copy makes nothing of them.
Status CheckCopiesOnly(const plan::TransferPlan& made) {
  for (const plan::Stream& stream : made.streams) {
    for (const plan::CopyOp& op : stream.ops) {
      if (op.transform == plan::Transform::kElements) continue;
      return Status(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                    "a checkpoint is loaded as it is stored: " +
                        std::string(layout::DTypeName(op.source_dtype)) +
                        " is not quantized on the way")
          .AtTensor(made.tensor_names[op.canonical])
          .Remedy("load it into ranks of its own dtype, or publish it to the engine");
    }
  }
  return OkStatus();
}

Result<std::string> Plan(const char* config, const char* from, const char* to, uint32_t rank) {
  WW_ASSIGN(const layout::ModelLayout source, LayoutOf(config, from, WW_CHECKPOINT_ALL_RANKS));
  WW_ASSIGN(const layout::ModelLayout target, LayoutOf(config, to, rank));
  WW_ASSIGN(const plan::TransferPlan made, plan::BuildPlan(source, target));
  WW_FAIL_IF_ERROR(plan::VerifyPlan(made, source, target));
  WW_FAIL_IF_ERROR(CheckCopiesOnly(made));
  return plan::ToBytes(made);
}

Result<std::string> Quantized(const char* config, const char* format) {
  WW_ASSIGN(std::string text, layout::ConfigInFormat(config, format));
  WW_ASSIGN(const layout::CanonicalSpace canonical, layout::CanonicalFromConfig(text));
  WW_ASSIGN(const auto fused, layout::FusedWeights(text));
  Json weights = Json::array();
  Json calibrated = Json::array();
  const auto add = [&](std::string_view name, const layout::TensorSpec& codes,
                       const std::string& scales, int64_t columns, layout::ScaleRule rule,
                       int64_t packed, bool turned) {
    weights.push_back(
        {{"name", name},
         {"codes", codes.name},
         {"scales", scales},
         {"block", {turned ? 1 : codes.block[0], columns}},
         {"rule", static_cast<int>(rule)},
         {"packed", packed},
         {"fused", fused.contains(std::string(name)) ? fused.at(std::string(name)) : ""},
         {"turned", turned}});
  };
  for (const layout::TensorSpec& tensor : canonical.tensors) {
    constexpr std::string_view kBlocks = layout::kFusedBlocks;
    if (!tensor.block.empty()) {
      add(layout::UnpackedName(tensor.name), tensor,
          canonical.tensors[*canonical.ScalesOf(tensor.name)].name, tensor.block[1] * tensor.packed,
          tensor.scale_rule, tensor.packed, false);
    } else if (tensor.dtype == layout::DType::kF8E4M3 && tensor.name.ends_with(".weight")) {
      return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                         "modelopt's FP8 gives gate and up of an expert one scale, which is not "
                         "made")
                      .AtTensor(tensor.name)
                      .Remedy("take fp8-channel-modelopt or nvfp4-modelopt, or leave the experts "
                              "out, in ignore of a config.json"));
    } else if (layout::IsCalibrated(tensor.name)) {
      calibrated.push_back(tensor.name);
    } else if (tensor.name.ends_with(kBlocks)) {  // gpt-oss'
      const auto name = tensor.name.substr(0, tensor.name.size() - kBlocks.size());
      add(name, tensor, name + std::string(layout::kFusedScales), 2 * tensor.shape.back(),
          layout::ScaleRule::kMxFp4, 2, true);
    }
  }
  return Json{{"config", std::move(text)},
              {"weights", std::move(weights)},
              {"calibrated", std::move(calibrated)}}
      .dump();
}

using kernels::Element;

/// kOpaque1 for what is not quantized.
Element FloatElement(const char* name) {
  const auto dtype = layout::DTypeFromName(name);
  return dtype == layout::DType::kBF16  ? Element::kBF16
         : dtype == layout::DType::kF16 ? Element::kF16
         : dtype == layout::DType::kF32 ? Element::kF32
                                        : Element::kOpaque1;
}

Status QuantizeFourBits(const char* name, const ww_checkpoint_matrix& matrix, const void* source,
                        void* codes, void* scales) {
  const Element from = FloatElement(name);
  const kernels::FourBitKind kind = kernels::FourBitKindOf(matrix.rule);
  if (from == Element::kOpaque1 || kernels::FourBitScaleBytes(kind, from) != matrix.scale_bytes ||
      matrix.rows < 1 || matrix.columns < 1 || matrix.block_rows != 1 || matrix.block_columns < 8 ||
      matrix.block_columns > 256 || matrix.block_columns % 8 != 0 ||
      matrix.columns % matrix.block_columns != 0) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  std::to_string(matrix.columns) + " columns of " + name + " in groups of " +
                      std::to_string(matrix.block_columns) + " cannot be quantized to four bits");
  }
  kernels::QuantizeFourBit(codes, scales, source, matrix.rows, matrix.columns, matrix.block_columns,
                           from, kind, matrix.global);
  return OkStatus();
}

Status AddToGlobal(const char* name, int32_t rule, const void* source, uint64_t elements,
                   float* amax, float* global) {
  const Element from = FloatElement(name);
  if (from == Element::kOpaque1 || !layout::IsNvFp4(static_cast<layout::ScaleRule>(rule))) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  std::string(name) + " has no global scale by rule " + std::to_string(rule));
  }
  const float here = kernels::LargestMagnitude(source, static_cast<int64_t>(elements), from);
  if (!std::isfinite(here) || here > *amax) *amax = here;  // NaN and infinity stay
  *global = kernels::NvFp4Global(*amax, from, kernels::FourBitKindOf(rule));
  return OkStatus();
}

Status QuantizeMatrix(const char* name, const ww_checkpoint_matrix& matrix, const void* source,
                      void* codes, void* scales) {
  if (layout::IsFourBit(static_cast<layout::ScaleRule>(matrix.rule))) {
    return QuantizeFourBits(name, matrix, source, codes, scales);
  }
  const Element from = FloatElement(name);
  const bool known = from != Element::kOpaque1 && matrix.rule >= 0 &&
                     matrix.rule <= static_cast<int>(layout::kLastScaleRule);
  const auto kind = kernels::ScaleKindOf(known ? matrix.rule : 0, matrix.scale_bytes);
  if (!known || kernels::ScaleBytes(kind, from) != matrix.scale_bytes ||
      std::min({matrix.rows, matrix.columns, matrix.block_rows, matrix.block_columns}) < 1) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  std::string("a matrix of ") + name + " with scales of " +
                      std::to_string(matrix.scale_bytes) + " bytes by rule " +
                      std::to_string(matrix.rule) + " cannot be quantized");
  }
  const int64_t across = (matrix.columns - 1) / matrix.block_columns + 1;
  kernels::QuantizeE4M3(codes, scales, source,
                        {matrix.rows,
                         matrix.columns,
                         matrix.block_rows,
                         matrix.block_columns,
                         {matrix.columns, 1},
                         {matrix.columns, 1},
                         {across, 1},
                         kind},
                        from);
  return OkStatus();
}

Result<kernels::StridedBox> BoxOf(const ww_checkpoint_block& block) {
  const uint32_t item = block.element_bytes;
  if (block.dims > WW_CHECKPOINT_DIMS_MAX || (item != 1 && item != 2 && item != 4 && item != 8)) {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       "a block of " + std::to_string(block.dims) + " dimensions and " +
                           std::to_string(item) + " bytes an element"));
  }
  kernels::StridedBox box;
  box.ndim = static_cast<int>(block.dims);
  std::copy_n(block.extent, block.dims, box.extent);
  std::copy_n(block.source_stride, block.dims, box.source_stride);
  std::copy_n(block.target_stride, block.dims, box.target_stride);
  return box;
}

struct DeltaScratch {
  delta::Coder coder{WW_CHECKPOINT_DELTA_BLOCK};
  std::vector<std::byte> made = std::vector<std::byte>(WW_CHECKPOINT_DELTA_BLOCK);
};

DeltaScratch& Scratch() {
  thread_local std::unique_ptr<DeltaScratch> scratch;
  if (scratch == nullptr) scratch = std::make_unique<DeltaScratch>();
  return *scratch;
}

Result<kernels::DeltaOrder> OrderOf(const char* name, uint64_t bytes) {
  const auto dtype = layout::DTypeFromName(name);
  if (!dtype || bytes % static_cast<uint64_t>(layout::ElementBytes(*dtype)) != 0) {
    return Fail(Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                       std::to_string(bytes) + " bytes are no elements of dtype '" + name + "'"));
  }
  return delta::OrderOf(*dtype);
}

/// The same of at most a block.
Result<kernels::DeltaOrder> OrderOfBlock(const char* name, uint64_t bytes) {
  if (bytes > WW_CHECKPOINT_DELTA_BLOCK) {
    return Fail(Status(Code::kInvalidArgument, Reason::kLimitExceeded,
                       std::to_string(bytes) + " bytes are more than a block"));
  }
  return OrderOf(name, bytes);
}

/// The code of a block, which was tried; empty where it is not shorter.
Result<delta::Coder::Code> CodeOf(kernels::DeltaOrder order, std::span<const std::byte> base,
                                  std::span<const std::byte> now) {
  DeltaScratch& scratch = Scratch();
  const delta::Coder::Code code = scratch.coder.Encode(order, base, now, now.size());
  if (code.bytes.empty()) return code;
  const auto made = std::span(scratch.made).first(now.size());
  WW_ASSIGN([[maybe_unused]] const uint64_t sum,
            scratch.coder.ApplyTo(order, code.bytes, base, made));
  // Not ranges::equal, which compares one std::byte after the other.
  if (!now.empty() && std::memcmp(made.data(), now.data(), now.size()) != 0) {
    return Fail(
        Status(Code::kInternal, Reason::kInternal, "a code does not give what it was made of")
            .Remedy("this is a bug of weightwire: report it with the two files"));
  }
  return code;
}

Status AddDelta(const char* name, std::span<const std::byte> base, std::span<const std::byte> now,
                ww_checkpoint_delta* sum) {
  WW_ASSIGN_OR_STATUS(const kernels::DeltaOrder order, OrderOf(name, now.size()));
  for (size_t at = 0; at < now.size(); at += WW_CHECKPOINT_DELTA_BLOCK) {
    const size_t bytes = std::min<size_t>(WW_CHECKPOINT_DELTA_BLOCK, now.size() - at);
    WW_ASSIGN_OR_STATUS(const delta::Coder::Code code,
                        CodeOf(order, base.subspan(at, bytes), now.subspan(at, bytes)));
    sum->changed += code.changes;
    sum->coded_bytes += code.bytes.empty() ? bytes : code.bytes.size();
  }
  return OkStatus();
}

Status EncodeBlock(const char* name, std::span<const std::byte> base,
                   std::span<const std::byte> now, std::byte* code, uint64_t* code_bytes) {
  WW_ASSIGN_OR_STATUS(const kernels::DeltaOrder order, OrderOfBlock(name, now.size()));
  WW_ASSIGN_OR_STATUS(const delta::Coder::Code made, CodeOf(order, base, now));
  std::ranges::copy(made.bytes, code);
  *code_bytes = made.bytes.size();
  return OkStatus();
}

Status ApplyBlock(const char* name, std::span<const std::byte> code, std::span<std::byte> target) {
  WW_ASSIGN_OR_STATUS(const kernels::DeltaOrder order, OrderOfBlock(name, target.size()));
  return Scratch().coder.Apply(order, code, target);
}

/// Runs work() → Status; no exception leaves it.
template <typename Work>
int32_t Guarded(Work work) {
  try {
    return Keep(work());
  } catch (const std::exception& failure) {  // no memory
    return Keep(Status(Code::kResourceExhausted, Reason::kLimitExceeded, failure.what()));
  }
}

}  // namespace
}  // namespace weightwire::checkpoint

using namespace weightwire::checkpoint;  // the C names below have no namespace of their own

uint32_t ww_checkpoint_abi_version(void) { return WW_CHECKPOINT_ABI_VERSION; }

ww_checkpoint_status ww_checkpoint_last(void) {
  return {static_cast<int32_t>(last.code()),
          static_cast<int32_t>(last.reason()),
          last.message().c_str(),
          last.rank().c_str(),
          last.tensor().c_str(),
          last.remedy().c_str()};
}

int32_t ww_checkpoint_layout(const char* config, const char* spec, uint32_t rank, uint32_t pieces,
                             ww_checkpoint_answer* answer) {
  return Answer(answer, [&] { return Layout(config, spec, rank, pieces != 0); });
}

int32_t ww_checkpoint_plan(const char* config, const char* from, const char* to, uint32_t rank,
                           ww_checkpoint_answer* answer) {
  return Answer(answer, [&] { return Plan(config, from, to, rank); });
}

int32_t ww_checkpoint_quantized(const char* config, const char* format,
                                ww_checkpoint_answer* answer) {
  return Answer(answer, [&] { return Quantized(config, format); });
}

int32_t ww_checkpoint_quantize(const char* dtype, const ww_checkpoint_matrix* matrix,
                               const void* source, void* codes, void* scales) {
  return Guarded([&] { return QuantizeMatrix(dtype, *matrix, source, codes, scales); });
}

int32_t ww_checkpoint_global(const char* dtype, int32_t rule, const void* source, uint64_t elements,
                             float* amax, float* global) {
  return Guarded([&] { return AddToGlobal(dtype, rule, source, elements, amax, global); });
}

int32_t ww_checkpoint_copy(void* target, const void* source, const ww_checkpoint_block* block) {
  auto box = BoxOf(*block);
  if (!box) return Keep(std::move(box).error());
  weightwire::kernels::CopyPastCaches(target, source, *box, block->element_bytes);
  return Keep(weightwire::OkStatus());
}

int32_t ww_checkpoint_read(void* target, int32_t fd, int64_t offset, const char* name,
                           const ww_checkpoint_block* block) {
  return Guarded([&]() -> weightwire::Status {
    const auto box = BoxOf(*block);
    if (!box) return box.error();
    return ReadBlock(fd, name, offset, target, *box, block->element_bytes);
  });
}

int32_t ww_checkpoint_delta_size(const char* dtype, const void* base, const void* now,
                                 uint64_t bytes, ww_checkpoint_delta* sum) {
  return Guarded([&] {
    return AddDelta(dtype, {static_cast<const std::byte*>(base), bytes},
                    {static_cast<const std::byte*>(now), bytes}, sum);
  });
}

int32_t ww_checkpoint_delta_encode(const char* dtype, const void* base, const void* now,
                                   uint64_t bytes, void* code, uint64_t* code_bytes) {
  return Guarded([&] {
    return EncodeBlock(dtype, {static_cast<const std::byte*>(base), bytes},
                       {static_cast<const std::byte*>(now), bytes}, static_cast<std::byte*>(code),
                       code_bytes);
  });
}

int32_t ww_checkpoint_delta_apply(const char* dtype, const void* code, uint64_t code_bytes,
                                  void* target, uint64_t bytes) {
  return Guarded([&] {
    return ApplyBlock(dtype, {static_cast<const std::byte*>(code), code_bytes},
                      {static_cast<std::byte*>(target), bytes});
  });
}
