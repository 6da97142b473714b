// Depth first over the terms by falling stride. At each term the counts worth trying are those that
// leave a rest which the smaller terms can still reach: between their least and greatest sum, and a
// multiple of the common divisor of their strides.
#include "server/plan/bounded_sum.h"

#include <algorithm>
#include <numeric>

namespace weightwire::plan {
namespace {

constexpr int kStepsMax = 1'000'000;

int64_t FloorDiv(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }
int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b > 0 ? 1 : 0); }

}  // namespace

BoundedSum::BoundedSum(std::vector<SumTerm> terms)
    : place_(terms.size()),
      low_(terms.size() + 1, 0),
      high_(terms.size() + 1, 0),
      divisor_(terms.size() + 1, 0),
      counts_(terms.size(), 0),
      solution_(terms.size(), 0) {
  std::iota(place_.begin(), place_.end(), size_t{0});
  std::stable_sort(place_.begin(), place_.end(),
                   [&](size_t a, size_t b) { return terms[a].stride > terms[b].stride; });
  for (size_t place : place_) terms_.push_back(terms[place]);
  for (size_t i = terms_.size(); i-- > 0;) {
    low_[i] = low_[i + 1] + terms_[i].low * terms_[i].stride;
    high_[i] = high_[i + 1] + terms_[i].high * terms_[i].stride;
    divisor_[i] = std::gcd(divisor_[i + 1], terms_[i].stride);
  }
}

BoundedSum::Answer BoundedSum::Count(int64_t sum) {
  found_ = 0;
  steps_ = 0;
  Search(0, sum);
  if (found_ > 1) return Answer::kSeveral;
  if (steps_ > kStepsMax) return Answer::kGaveUp;
  return found_ == 1 ? Answer::kOne : Answer::kNone;
}

void BoundedSum::Search(size_t level, int64_t rest) {
  if (found_ > 1 || ++steps_ > kStepsMax) return;
  if (level == terms_.size()) {
    if (rest != 0) return;
    ++found_;
    for (size_t i = 0; i < terms_.size(); ++i) solution_[place_[i]] = counts_[i];
    return;
  }
  if (rest % divisor_[level] != 0) return;
  const SumTerm& term = terms_[level];
  const int64_t first = std::max(term.low, CeilDiv(rest - high_[level + 1], term.stride));
  const int64_t last = std::min(term.high, FloorDiv(rest - low_[level + 1], term.stride));
  for (int64_t count = first; count <= last; ++count) {
    counts_[level] = count;
    Search(level + 1, rest - count * term.stride);
  }
}

}  // namespace weightwire::plan
