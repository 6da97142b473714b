#include "tests/sim/remembering_work.h"

#include <algorithm>

namespace weightwire::sim {

using coordinator::AgreedLayoutPtr;
using coordinator::PlannedPairPtr;
using coordinator::RankOffer;
using coordinator::SchemeLayout;

Result<SchemeLayout> RememberingWork::Scheme(const std::string& config_json,
                                             const std::string& spec) const {
  auto found = schemes_.find({config_json, spec});
  if (found == schemes_.end()) {
    found = schemes_.emplace(std::pair(config_json, spec), Work::Scheme(config_json, spec)).first;
  }
  return found->second;
}

Result<RankOffer> RememberingWork::Offer(const control::LayoutSubmission& submission,
                                         const SchemeLayout& scheme, uint32_t rank,
                                         uint32_t world) const {
  const std::tuple key(scheme.model.get(), rank, world);
  auto found = offers_.find(key);
  if (found == offers_.end()) {
    Offered offered{submission.observed, Work::Offer(submission, scheme, rank, world)};
    found = offers_.emplace(key, std::move(offered)).first;
  }
  const auto fields = [](const layout::ObservedTensor& t) {
    return std::tie(t.name, t.dtype, t.shape);
  };
  WW_CHECK(std::ranges::equal(found->second.observed, submission.observed, {}, fields, fields));
  return found->second.offer;
}

AgreedLayoutPtr RememberingWork::Assemble(const layout::CanonicalSpace& canonical,
                                          const Ranks& ranks) const {
  AgreedLayoutPtr& agreed = agreed_[ranks];
  if (agreed == nullptr) agreed = Work::Assemble(canonical, ranks);
  return agreed;
}

Result<PlannedPairPtr> RememberingWork::Plan(const AgreedLayoutPtr& source,
                                             const AgreedLayoutPtr& target) const {
  auto found = plans_.find({source, target});
  if (found == plans_.end()) {
    found = plans_.emplace(std::pair(source, target), Work::Plan(source, target)).first;
  }
  return found->second;
}

std::shared_ptr<const plan::RankSlice> RememberingWork::Slice(const plan::TransferPlan& plan,
                                                              plan::Side side,
                                                              uint32_t rank) const {
  auto& slice = slices_[{&plan, side, rank}];
  if (slice == nullptr) slice = Work::Slice(plan, side, rank);
  return slice;
}

}  // namespace weightwire::sim
