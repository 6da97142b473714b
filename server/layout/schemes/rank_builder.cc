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

/// "1, 2 or 4"; of many the smallest.
std::string DivisorsText(int64_t size) {
  constexpr size_t kShown = 12;
  constexpr int64_t kTried = 4'096;  // nobody splits anything into more parts
  std::vector<int64_t> divisors;
  for (int64_t one = 1; one <= std::min(size, kTried) && divisors.size() <= kShown; ++one) {
    if (size % one == 0) divisors.push_back(one);
  }
  const bool all = divisors.size() <= kShown && size <= kTried;
  std::string text;
  for (size_t i = 0; i < std::min(divisors.size(), kShown); ++i) {
    const bool last = all && i > 0 && i + 1 == divisors.size();
    text += (i == 0 ? "" : last ? " or " : ", ") + std::to_string(divisors[i]);
  }
  return all ? text : text + ", …";
}

}  // namespace

void RankBuilder::Stored(std::string name, uint32_t tensor, Shape shape) {
  const TensorSpec& spec = canonical_.tensors[tensor];
  Start(std::move(name), spec.dtype, std::move(shape));
  rank_.tensors.back().pieces.push_back(
      {tensor, {Shape(spec.shape.size(), 0), spec.shape}, 0, RowMajorStrides(spec.shape)});
}

void RankBuilder::Columns(std::string name, const View& view, int64_t begin, int64_t width) {
  Start(std::move(name), canonical_.tensors[view.tensor].dtype, {view.rows(), width});
  Put(view, {0, view.rows()}, {begin, width}, 0, width, 1);
}

void RankBuilder::Rows(std::string name, std::span<const RowRun> runs, int64_t begin,
                       int64_t rows) {
  const View& first = runs.front().view;
  const int64_t columns = first.columns();
  Start(std::move(name), canonical_.tensors[first.tensor].dtype,
        first.column_dim < 0 ? Shape{rows} : Shape{rows, columns});
  int64_t run_begin = 0;
  for (const RowRun& run : runs) {
    const int64_t from = std::max(begin, run_begin);
    const int64_t to = std::min(begin + rows, run_begin + run.rows);
    if (from < to && fits_) {
      Put(run.view, {run.begin + from - run_begin, to - from}, {0, columns},
          (from - begin) * columns, columns, 1);
    }
    run_begin += run.rows;
  }
}

void RankBuilder::Start(std::string name, DType dtype, Shape shape) {
  fits_ = StorageBytes(dtype, shape).has_value();
  if (!fits_) {
    Refuse(Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                  "the local tensor's byte count does not fit 64 bits")
               .AtTensor(name));
  }
  rank_.tensors.push_back({std::move(name), dtype, std::move(shape), {}});
}

void RankBuilder::Put(const View& view, Range rows, Range columns, int64_t offset,
                      int64_t row_stride, int64_t column_stride) {
  if (!fits_) return;
  Piece piece{view.tensor, view.box, offset, Shape(view.box.begin.size(), 1)};
  const auto place = [&piece](int dim, Range range, int64_t stride) {
    const auto d = static_cast<size_t>(dim);
    piece.box.begin[d] += range.begin;
    piece.box.extent[d] = range.count;
    piece.local_stride[d] = stride;
  };
  place(view.row_dim, rows, row_stride);
  if (view.column_dim >= 0) place(view.column_dim, columns, column_stride);
  rank_.tensors.back().pieces.push_back(std::move(piece));
}

void RankBuilder::Refuse(Status status) {
  if (failure_.ok()) failure_ = std::move(status);
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

Status CheckDivides(std::string_view what, int64_t size, std::string_view by, int64_t parts,
                    std::string tensor) {
  if (size % parts == 0) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kShapeMismatch,
                std::string(what) + ": expected a multiple of " + std::string(by) + " " +
                    std::to_string(parts) + ", found " + std::to_string(size))
      .AtTensor(std::move(tensor))
      .Remedy(std::string(by) + " must divide " + std::to_string(size) + ": " + DivisorsText(size));
}

std::optional<int64_t> RoundUpChecked(int64_t value, int64_t multiple) {
  const int64_t remainder = value % multiple;
  if (remainder == 0) return value;
  int64_t rounded = 0;
  if (__builtin_add_overflow(value, multiple - remainder, &rounded)) return std::nullopt;
  return rounded;
}

}  // namespace weightwire::layout
