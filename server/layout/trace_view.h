#pragma once

#include "server/layout/trace.h"

namespace weightwire::layout {

/// A block of a canonical tensor as a chain of torch views presents it.
class TraceView {
 public:
  explicit TraceView(const TensorSpec& tensor);

  ///   kInvalidArgument / kInvalidRequest  the operation is unknown or does not fit
  Status Apply(const TraceOp& op);
  /// False while an unbind waits for its __getitem__.
  bool IsTensor() const { return unbound_ < 0; }
  Shape ViewShape() const;
  /// The block, in the dimensions of the canonical tensor.
  const Box& box() const { return box_; }
  /// Strides by canonical dimension from strides by dimension of the view; 1 for a dimension that
  /// the view does not have, where the block has one index.
  std::vector<int64_t> CanonicalStrides(const std::vector<int64_t>& view_strides) const;

 private:
  /// A dimension of the view: one of the canonical tensor's, or kUnit.
  static constexpr int kUnit = -1;
  int64_t ExtentOf(size_t dim) const;
  std::optional<size_t> DimOf(int64_t argument, size_t ndim) const;
  bool Narrow(int64_t dim, int64_t start, int64_t length);
  bool Select(int64_t dim, int64_t index);
  bool Unsqueeze(int64_t dim);
  bool Transpose(int64_t a, int64_t b);
  bool Unbind(int64_t dim);
  bool GetItem(int64_t index);

  Box box_;
  std::vector<int> dims_;
  int64_t unbound_ = -1;  ///< dimension of a pending unbind
};

}  // namespace weightwire::layout
