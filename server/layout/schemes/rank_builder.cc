#include "server/layout/schemes/rank_builder.h"

#include <algorithm>

#include "server/base/checked.h"

namespace weightwire::layout {
namespace {

constexpr int64_t kPiecesTotalMax = 50'000'000;

Shape RowMajorStrides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

int64_t ElementsPerRow(const Shape& shape) {
  int64_t elements = 1;
  for (size_t d = 1; d < shape.size(); ++d) elements *= shape[d];
  return elements;
}

}  // namespace

void RankBuilder::Whole(std::string name, uint32_t tensor) {
  const TensorSpec& spec = canonical_.tensors[tensor];
  Piece piece{tensor, {Shape(spec.shape.size(), 0), spec.shape}, 0, RowMajorStrides(spec.shape)};
  Add({std::move(name), spec.dtype, spec.shape, {std::move(piece)}});
}

void RankBuilder::Columns(std::string name, uint32_t tensor, int64_t begin, int64_t width) {
  const TensorSpec& spec = canonical_.tensors[tensor];
  const Shape shape = {spec.shape[0], width};
  Add({std::move(name), spec.dtype, shape, {{tensor, {{0, begin}, shape}, 0, {width, 1}}}});
}

void RankBuilder::Rows(std::string name, std::span<const RowRun> runs, int64_t begin,
                       int64_t rows) {
  const TensorSpec& first = canonical_.tensors[runs.front().tensor];
  LocalTensor local{std::move(name), first.dtype, first.shape, {}};
  local.shape[0] = rows;
  if (!StorageBytes(local.dtype, local.shape)) return Add(std::move(local));
  const int64_t row_elements = ElementsPerRow(first.shape);
  int64_t run_begin = 0;
  for (const RowRun& run : runs) {
    const int64_t from = std::max(begin, run_begin);
    const int64_t to = std::min(begin + rows, run_begin + run.rows);
    if (from < to) {
      Piece piece{
          run.tensor, {Shape(first.shape.size(), 0), first.shape}, 0, RowMajorStrides(first.shape)};
      piece.box.begin[0] = run.begin + from - run_begin;
      piece.box.extent[0] = to - from;
      piece.local_offset = (from - begin) * row_elements;
      local.pieces.push_back(std::move(piece));
    }
    run_begin += run.rows;
  }
  Add(std::move(local));
}

void RankBuilder::Add(LocalTensor tensor) {
  if (failure_.ok() && !StorageBytes(tensor.dtype, tensor.shape)) {
    failure_ = Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                      "the local tensor's byte count does not fit 64 bits")
                   .AtTensor(tensor.name);
  }
  rank_.tensors.push_back(std::move(tensor));
}

Result<RankLayout> RankBuilder::Finish() && {
  WW_FAIL_IF_ERROR(std::move(failure_));
  return std::move(rank_);
}

Result<int64_t> WorldSize(std::initializer_list<int64_t> sizes) {
  const std::optional<int64_t> world = CheckedProduct({sizes.begin(), sizes.size()});
  const auto ranks_max = static_cast<int64_t>(LayoutLimits{}.ranks_max);
  if (!world || *world > ranks_max) {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                "the parallel sizes give more than " + std::to_string(ranks_max) + " ranks");
  }
  return *world;
}

Status CheckPieces(int64_t pieces, int64_t ranks) {
  const auto rank_max = static_cast<int64_t>(LayoutLimits{}.pieces_per_rank_max);
  if (pieces <= rank_max && pieces <= kPiecesTotalMax / ranks) return OkStatus();
  return {Code::kResourceExhausted, Reason::kLimitExceeded,
          std::to_string(ranks) + " ranks with up to " + std::to_string(pieces) +
              " pieces each; at most " + std::to_string(rank_max) + " per rank and " +
              std::to_string(kPiecesTotalMax) + " in all are allowed"};
}

Status CheckDivides(std::string_view what, int64_t size, int64_t parts) {
  if (size % parts == 0) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::string(what) + " is " + std::to_string(size) + ", no multiple of " +
                    std::to_string(parts))
      .Remedy("choose parallel sizes that divide it");
}

std::optional<int64_t> RoundUpChecked(int64_t value, int64_t multiple) {
  const int64_t remainder = value % multiple;
  if (remainder == 0) return value;
  int64_t rounded = 0;
  if (__builtin_add_overflow(value, multiple - remainder, &rounded)) return std::nullopt;
  return rounded;
}

}  // namespace weightwire::layout
