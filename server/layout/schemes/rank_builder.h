#pragma once

#include <optional>
#include <span>
#include <string>

#include "server/layout/types.h"

namespace weightwire::layout {

/// `rows` consecutive rows of a canonical tensor, from row `begin`.
struct RowRun {
  uint32_t tensor = 0;
  int64_t begin = 0;
  int64_t rows = 0;
};

/// Collects the local tensors of one rank. Not a check of the scheme's arithmetic: boxes must lie
/// inside their tensors. What comes from outside and may be too large is remembered and returned by
/// Finish.
class RankBuilder {
 public:
  explicit RankBuilder(const CanonicalSpace& canonical) : canonical_(canonical) {}

  /// The whole canonical tensor.
  void Whole(std::string name, uint32_t tensor);
  /// Columns [begin, begin + width) of a matrix.
  void Columns(std::string name, uint32_t tensor, int64_t begin, int64_t width);
  /// Rows [begin, begin + rows) of all `runs` stacked along dimension 0; rows beyond the last run
  /// are padding. There is at least one run, and the tensors share dtype and columns.
  void Rows(std::string name, std::span<const RowRun> runs, int64_t begin, int64_t rows);

  ///   kInvalidArgument / kShapeOverflow  a local tensor's byte count does not fit int64
  Result<RankLayout> Finish() &&;

 private:
  void Add(LocalTensor tensor);

  const CanonicalSpace& canonical_;
  RankLayout rank_;
  Status failure_;
};

/// tp · cp · dp · pp …; kResourceExhausted / kLimitExceeded over LayoutLimits::ranks_max.
Result<int64_t> WorldSize(std::initializer_list<int64_t> sizes);
/// To be asked before anything is derived: kResourceExhausted / kLimitExceeded when `pieces` are
/// more than LayoutLimits allow one rank, or than one model may have on `ranks` of them.
Status CheckPieces(int64_t pieces, int64_t ranks);
/// kInvalidArgument / kShapeMismatch unless `size` is a multiple of `parts`; `what` names the size.
Status CheckDivides(std::string_view what, int64_t size, int64_t parts);
/// The smallest multiple of `multiple` that is at least `value`; nullopt on overflow.
std::optional<int64_t> RoundUpChecked(int64_t value, int64_t multiple);

}  // namespace weightwire::layout
