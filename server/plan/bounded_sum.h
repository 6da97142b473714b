#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace weightwire::plan {

/// `count · stride` with low ≤ count ≤ high; stride ≥ 1.
struct SumTerm {
  int64_t stride = 1;
  int64_t low = 0;
  int64_t high = 0;
};

/// Searches the counts for which the terms add up to a given sum. Exact; at most two or three
/// branches per term when strides nest, as those of blocks in row-major storage do.
class BoundedSum {
 public:
  explicit BoundedSum(std::vector<SumTerm> terms);

  enum class Answer { kNone, kOne, kSeveral, kGaveUp };
  /// How many solutions there are. kGaveUp after a million steps, which only contrived strides
  /// need.
  Answer Count(int64_t sum);
  /// Counts of the solution last found, in the order of the constructor's terms. Valid after kOne
  /// and kSeveral.
  const std::vector<int64_t>& solution() const { return solution_; }

 private:
  void Search(size_t level, int64_t rest);

  std::vector<SumTerm> terms_;    ///< by falling stride
  std::vector<size_t> place_;     ///< of terms_[i] in the constructor's order
  std::vector<int64_t> low_;      ///< least sum of terms_[i..]
  std::vector<int64_t> high_;     ///< greatest
  std::vector<int64_t> divisor_;  ///< greatest common divisor of the strides of terms_[i..]
  std::vector<int64_t> counts_;
  std::vector<int64_t> solution_;
  int found_ = 0;
  int steps_ = 0;
};

}  // namespace weightwire::plan
