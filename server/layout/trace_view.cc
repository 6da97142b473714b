#include "server/layout/trace_view.h"

#include <numeric>

namespace weightwire::layout {

TraceView::TraceView(const TensorSpec& tensor)
    : box_{Shape(tensor.shape.size(), 0), tensor.shape}, dims_(tensor.shape.size()) {
  std::iota(dims_.begin(), dims_.end(), 0);
}

int64_t TraceView::ExtentOf(size_t dim) const {
  return dims_[dim] == kUnit ? 1 : box_.extent[static_cast<size_t>(dims_[dim])];
}

std::optional<size_t> TraceView::DimOf(int64_t argument, size_t ndim) const {
  const auto count = static_cast<int64_t>(ndim);
  if (argument < -count || argument >= count) return std::nullopt;
  return static_cast<size_t>(argument < 0 ? argument + count : argument);
}

bool TraceView::Narrow(int64_t dim, int64_t start, int64_t length) {
  const auto d = DimOf(dim, dims_.size());
  if (!d || start < 0 || length < 1 || length > ExtentOf(*d) || start > ExtentOf(*d) - length) {
    return false;
  }
  if (dims_[*d] == kUnit) return true;
  const auto canonical_dim = static_cast<size_t>(dims_[*d]);
  box_.begin[canonical_dim] += start;
  box_.extent[canonical_dim] = length;
  return true;
}

bool TraceView::Select(int64_t dim, int64_t index) {
  const auto d = DimOf(dim, dims_.size());
  if (!d || index < -ExtentOf(*d)) return false;
  if (!Narrow(dim, index < 0 ? index + ExtentOf(*d) : index, 1)) return false;
  dims_.erase(dims_.begin() + static_cast<std::ptrdiff_t>(*d));
  return true;
}

bool TraceView::Unsqueeze(int64_t dim) {
  const auto d = DimOf(dim, dims_.size() + 1);
  if (!d || dims_.size() >= 2 * kMaxDims) return false;
  dims_.insert(dims_.begin() + static_cast<std::ptrdiff_t>(*d), kUnit);
  return true;
}

bool TraceView::Transpose(int64_t a, int64_t b) {
  const auto first = DimOf(a, dims_.size());
  const auto second = DimOf(b, dims_.size());
  if (!first || !second) return false;
  std::swap(dims_[*first], dims_[*second]);
  return true;
}

bool TraceView::Unbind(int64_t dim) {
  const auto d = DimOf(dim, dims_.size());
  if (!d) return false;
  unbound_ = static_cast<int64_t>(*d);
  return true;
}

bool TraceView::GetItem(int64_t index) {
  const int64_t dim = IsTensor() ? 0 : unbound_;
  unbound_ = -1;
  return Select(dim, index);
}

Status TraceView::Apply(const TraceOp& op) {
  const auto& a = op.arguments;
  bool fits = false;
  if (op.name == "__getitem__") {
    fits = a.size() == 1 && GetItem(a[0]);
  } else if (!IsTensor()) {
    fits = false;
  } else if (op.name == "narrow") {
    fits = a.size() == 3 && Narrow(a[0], a[1], a[2]);
  } else if (op.name == "select") {
    fits = a.size() == 2 && Select(a[0], a[1]);
  } else if (op.name == "unsqueeze") {
    fits = a.size() == 1 && Unsqueeze(a[0]);
  } else if (op.name == "unbind") {
    fits = a.size() <= 1 && Unbind(a.empty() ? 0 : a[0]);
  } else if (op.name == "transpose") {
    fits = a.size() == 2 && Transpose(a[0], a[1]);
  } else if (op.name == "t") {
    fits = a.empty() && dims_.size() == 2 && Transpose(0, 1);
  } else {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "the loader's operation \"" + op.name.substr(0, 64) + "\" is not understood")
        .Remedy("record the tensor whole");
  }
  if (fits) return OkStatus();
  return {Code::kInvalidArgument, Reason::kInvalidRequest,
          "the loader's operation " + op.name + " does not fit the view that it is applied to"};
}

Shape TraceView::ViewShape() const {
  Shape shape;
  for (size_t d = 0; d < dims_.size(); ++d) shape.push_back(ExtentOf(d));
  return shape;
}

std::vector<int64_t> TraceView::CanonicalStrides(const std::vector<int64_t>& view_strides) const {
  std::vector<int64_t> strides(box_.extent.size(), 1);
  for (size_t d = 0; d < dims_.size(); ++d) {
    if (dims_[d] != kUnit) strides[static_cast<size_t>(dims_[d])] = view_strides[d];
  }
  return strides;
}

}  // namespace weightwire::layout
