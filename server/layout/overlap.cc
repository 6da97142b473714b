// Pieces are sorted by the first storage element that they touch and swept: only pieces whose
// storage intervals intersect are compared, so blocks that lie one after another cost nothing.
//
// Two pieces a and b share an element when  Σ s_i·x_i − Σ t_j·y_j = offset_b − offset_a  has a
// solution with 0 ≤ x_i < n_i and 0 ≤ y_j < m_j. With all terms sorted by stride, greatest first,
// the value of each is confined to the few that the remaining terms can still make up for: for
// strides that nest (any view of a row-major tensor) at most three per term. Strides that do not
// nest may need more, which the step budget bounds; the answer is exact whenever there is one.
#include "server/layout/overlap.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

namespace weightwire::layout {
namespace {

/// Wide enough for any sum of two addresses and two spans, each of which fits int64.
__extension__ using Wide = __int128;

Wide FloorDiv(Wide a, Wide b) { return a / b - (a % b < 0 ? 1 : 0); }
Wide CeilDiv(Wide a, Wide b) { return a / b + (a % b > 0 ? 1 : 0); }

/// stride · z for low ≤ z ≤ high.
struct Term {
  int64_t stride = 1;
  int64_t low = 0;
  int64_t high = 0;
};

/// Greatest stride first. Insertion: there are at most sixteen terms, and usually two in order.
void SortByStride(std::span<Term> terms) {
  for (size_t i = 1; i < terms.size(); ++i) {
    const Term moved = terms[i];
    size_t at = i;
    for (; at > 0 && terms[at - 1].stride < moved.stride; --at) terms[at] = terms[at - 1];
    terms[at] = moved;
  }
}

/// Decides whether a sum of terms can equal a target.
class BoundedSum {
 public:
  explicit BoundedSum(int64_t& steps_left) : steps_left_(steps_left) {}

  void Clear() { count_ = 0; }
  void Add(Term term) { terms_[count_++] = term; }

  /// Meaningless when steps_left has become negative.
  bool Reaches(Wide target) {
    SortByStride({terms_.data(), count_});
    MergeEqualStrides();
    rest_[count_] = {};
    for (size_t i = count_; i-- > 0;) {
      const Term& term = terms_[i];
      const Rest& inner = rest_[i + 1];
      rest_[i] = {inner.low + Wide{term.stride} * term.low,
                  inner.high + Wide{term.stride} * term.high, std::gcd(inner.gcd, term.stride)};
    }
    return Search(0, target);
  }

 private:
  struct Rest {
    Wide low = 0;
    Wide high = 0;
    int64_t gcd = 0;
  };

  void MergeEqualStrides() {
    size_t kept = 0;
    for (size_t i = 0; i < count_; ++i) {
      if (kept > 0 && terms_[kept - 1].stride == terms_[i].stride) {
        terms_[kept - 1].low += terms_[i].low;
        terms_[kept - 1].high += terms_[i].high;
      } else {
        terms_[kept++] = terms_[i];
      }
    }
    count_ = kept;
  }

  bool Search(size_t i, Wide target) {
    if (--steps_left_ < 0) return false;
    if (target < rest_[i].low || target > rest_[i].high) return false;
    if (i == count_) return true;
    if (target % rest_[i].gcd != 0) return false;
    const Term& term = terms_[i];
    const Wide first = std::max<Wide>(term.low, CeilDiv(target - rest_[i + 1].high, term.stride));
    const Wide last = std::min<Wide>(term.high, FloorDiv(target - rest_[i + 1].low, term.stride));
    for (Wide z = first; z <= last && steps_left_ >= 0; ++z) {
      if (Search(i + 1, target - z * term.stride)) return true;
    }
    return false;
  }

  int64_t& steps_left_;
  size_t count_ = 0;
  std::array<Term, 2 * kMaxDims> terms_;
  std::array<Rest, 2 * kMaxDims + 1> rest_;
};

int64_t LastElement(const Piece& piece) {
  int64_t last = piece.local_offset;
  for (size_t d = 0; d < piece.box.extent.size(); ++d) {
    last += (piece.box.extent[d] - 1) * piece.local_stride[d];
  }
  return last;
}

bool PairOverlaps(const Piece& a, const Piece& b, BoundedSum& sum) {
  sum.Clear();
  for (size_t d = 0; d < a.box.extent.size(); ++d) {
    if (a.box.extent[d] > 1) sum.Add({a.local_stride[d], 0, a.box.extent[d] - 1});
  }
  for (size_t d = 0; d < b.box.extent.size(); ++d) {
    if (b.box.extent[d] > 1) sum.Add({b.local_stride[d], 1 - b.box.extent[d], 0});
  }
  return sum.Reaches(Wide{b.local_offset} - a.local_offset);
}

/// Two different index vectors of one piece meet when the strides weighted with their difference
/// sum up to zero. The outermost differing index may be taken as the greater one.
bool SelfOverlaps(const Piece& piece, BoundedSum& sum) {
  std::array<Term, kMaxDims> axes;
  size_t count = 0;
  for (size_t d = 0; d < piece.box.extent.size(); ++d) {
    if (piece.box.extent[d] > 1)
      axes[count++] = {piece.local_stride[d], 0, piece.box.extent[d] - 1};
  }
  SortByStride({axes.data(), count});
  int64_t inner_span = 0;
  bool nested = true;
  for (size_t i = count; i-- > 0;) {
    nested = nested && axes[i].stride > inner_span;
    inner_span += axes[i].stride * axes[i].high;
  }
  if (nested) return false;
  for (size_t outer = 0; outer < count; ++outer) {
    sum.Clear();
    sum.Add({axes[outer].stride, 1, axes[outer].high});
    for (size_t i = outer + 1; i < count; ++i)
      sum.Add({axes[i].stride, -axes[i].high, axes[i].high});
    if (sum.Reaches(0)) return true;
  }
  return false;
}

struct Interval {
  int64_t first;
  int64_t last;
  size_t piece;
};

}  // namespace

Result<std::optional<std::pair<size_t, size_t>>> FindOverlap(std::span<const Piece> pieces,
                                                             int64_t& steps_left) {
  BoundedSum sum(steps_left);
  const auto exhausted = [] {
    return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                "too many pieces interleave, or their strides are too intricate, to prove that "
                "they do not overlap");
  };
  std::vector<Interval> intervals;
  intervals.reserve(pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool overlaps = SelfOverlaps(pieces[i], sum);
    if (steps_left < 0) return exhausted();
    if (overlaps) return std::pair{i, i};
    intervals.push_back({pieces[i].local_offset, LastElement(pieces[i]), i});
  }
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.first < b.first; });
  std::vector<Interval> open;
  for (const Interval& next : intervals) {
    for (size_t i = 0; i < open.size();) {
      if (open[i].last < next.first) {
        open[i] = open.back();
        open.pop_back();
        continue;
      }
      const bool overlaps = PairOverlaps(pieces[open[i].piece], pieces[next.piece], sum);
      if (steps_left < 0) return exhausted();
      if (overlaps) return std::minmax(open[i].piece, next.piece);
      ++i;
    }
    open.push_back(next);
  }
  return std::nullopt;
}

}  // namespace weightwire::layout
