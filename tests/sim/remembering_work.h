#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "server/coordinator/work.h"

namespace weightwire::sim {

/// Layouts and plans of the one model that all fleets have, each computed once for thousands of
/// seeds: what they are is other tests' matter. Keeps everything, so that addresses can be keys.
/// Not thread-safe.
class RememberingWork final : public coordinator::Work {
 public:
  Result<coordinator::SchemeLayout> Scheme(const std::string& config_json,
                                           const std::string& spec) const override;
  Result<coordinator::RankOffer> Offer(const control::LayoutSubmission& submission,
                                       const coordinator::SchemeLayout& scheme, uint32_t rank,
                                       uint32_t world) const override;
  coordinator::AgreedLayoutPtr Assemble(
      const layout::CanonicalSpace& canonical,
      const std::vector<std::shared_ptr<const layout::RankLayout>>& ranks) const override;
  Result<coordinator::PlannedPairPtr> Plan(
      const coordinator::AgreedLayoutPtr& source,
      const coordinator::AgreedLayoutPtr& target) const override;
  std::shared_ptr<const plan::RankSlice> Slice(const plan::TransferPlan& plan, plan::Side side,
                                               uint32_t rank) const override;

 private:
  using Ranks = std::vector<std::shared_ptr<const layout::RankLayout>>;
  struct Offered {
    std::vector<layout::ObservedTensor> observed;
    Result<coordinator::RankOffer> offer;
  };
  mutable std::map<std::pair<std::string, std::string>, Result<coordinator::SchemeLayout>> schemes_;
  mutable std::map<std::tuple<const layout::ModelLayout*, uint32_t, uint32_t>, Offered> offers_;
  mutable std::map<Ranks, coordinator::AgreedLayoutPtr> agreed_;
  mutable std::map<std::pair<coordinator::AgreedLayoutPtr, coordinator::AgreedLayoutPtr>,
                   Result<coordinator::PlannedPairPtr>>
      plans_;
  mutable std::map<std::tuple<const plan::TransferPlan*, plan::Side, uint32_t>,
                   std::shared_ptr<const plan::RankSlice>>
      slices_;
};

}  // namespace weightwire::sim
