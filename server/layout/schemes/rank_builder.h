#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "server/layout/families/family.h"

namespace weightwire::layout {

/// Rows (or columns) [begin, begin + count) of a view.
struct Range {
  int64_t begin = 0;
  int64_t count = 0;
};

/// `rows` consecutive rows of a view, from row `begin`.
struct RowRun {
  View view;
  int64_t begin = 0;
  int64_t rows = 0;
};

/// Collects the local tensors of one rank. Not a check of the scheme's arithmetic: ranges must lie
/// inside their views. What comes from outside and may be too large is remembered and returned by
/// Finish. A view of one dimension gives a local tensor of one dimension.
class RankBuilder {
 public:
  explicit RankBuilder(const CanonicalSpace& canonical) : canonical_(canonical) {}

  /// The whole canonical tensor, stored as `shape`: the same elements in the same order.
  void Stored(std::string name, uint32_t tensor, Shape shape);
  /// Columns [begin, begin + width) of a matrix.
  void Columns(std::string name, const View& view, int64_t begin, int64_t width);
  /// Rows [begin, begin + rows) of all `runs` stacked along dimension 0; rows beyond the last run
  /// are padding. There is at least one run, and the views share dtype and columns.
  void Rows(std::string name, std::span<const RowRun> runs, int64_t begin, int64_t rows);

  /// A tensor of an arrangement of its own, which Put fills.
  void Start(std::string name, DType dtype, Shape shape);
  /// Into the tensor begun last: element (i, j) of that block of `view` lies at
  /// `offset + i · row_stride + j · column_stride`.
  void Put(const View& view, Range rows, Range columns, int64_t offset, int64_t row_stride,
           int64_t column_stride);

  /// The first failure is what Finish returns.
  void Refuse(Status status);
  ///   kInvalidArgument / kShapeOverflow  a local tensor's byte count does not fit int64
  Result<RankLayout> Finish() &&;

 private:
  const CanonicalSpace& canonical_;
  RankLayout rank_;
  Status failure_;
  bool fits_ = true;  ///< the tensor begun last; otherwise nothing is put into it
};

/// tp · cp · dp · pp …; kResourceExhausted / kLimitExceeded over LayoutLimits::ranks_max.
Result<int64_t> WorldSize(std::initializer_list<int64_t> sizes);
/// To be asked before anything is derived: kResourceExhausted / kLimitExceeded when `pieces` are
/// more than LayoutLimits allow one rank, or than one model may have on `ranks` of them.
Status CheckPieces(int64_t pieces, int64_t ranks);
/// kInvalidArgument / kShapeMismatch unless `size` is a multiple of `parts`. `what` and `by` name
/// the two ("num_attention_heads", "tp"), `tensor` one that is cut so.
Status CheckDivides(std::string_view what, int64_t size, std::string_view by, int64_t parts,
                    std::string tensor);
/// The smallest multiple of `multiple` that is at least `value`; nullopt on overflow.
std::optional<int64_t> RoundUpChecked(int64_t value, int64_t multiple);

}  // namespace weightwire::layout
