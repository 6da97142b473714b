#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/control/control.h"
#include "server/layout/scheme.h"
#include "server/plan/plan.h"

namespace weightwire::coordinator {

/// What a scheme says about a model, with the fingerprint of the canonical space.
struct SchemeLayout {
  std::shared_ptr<const layout::ModelLayout>
      model;  ///< null: no scheme describes what the engine holds
  std::shared_ptr<const layout::CanonicalSpace> canonical;
  layout::Fingerprint canonical_fingerprint;
  /// In the shapes of checkpoints, which traces see; `canonical` itself where they are the same.
  std::shared_ptr<const layout::CanonicalSpace> stored = {};
  std::vector<std::string> notes;  ///< layout::NotesOfConfig's
};

/// Where a rank of a group is among the ranks that share one of its models.
struct PlaceInModel {
  std::string model;
  uint32_t rank = 0;
  uint32_t world_size = 0;  ///< 0: it has nothing of the model
  friend bool operator==(const PlaceInModel&, const PlaceInModel&) = default;
};

/// What a rank holds, as its process and its scheme agree on it.
struct RankOffer {
  std::shared_ptr<const layout::RankLayout> layout;
  std::shared_ptr<const layout::CanonicalSpace> canonical;
  layout::Fingerprint canonical_fingerprint;
  int64_t bytes = 0;
  std::vector<std::string> notes;
  std::vector<PlaceInModel> places = {};  ///< one for each model; none where it has no name
};
/// What a rank offers of one of its models.
struct OfferOfModel {
  PlaceInModel place;
  RankOffer offer;
};

/// What all ranks of a group hold, once every rank has agreed.
struct AgreedLayout {
  layout::ModelLayout model;
  layout::Fingerprint fingerprint;
  layout::Fingerprint elements = {};     ///< layout::ElementsFingerprintOf(model.canonical)
  std::vector<std::string> models = {};  ///< layout::ModelsOf(model.canonical)
};
using AgreedLayoutPtr = std::shared_ptr<const AgreedLayout>;

/// A proved plan with the layouts that it joins: those that were agreed, or the same ones with
/// dimensions split as the other side has them (layout/joined.h).
struct PlannedPair {
  std::shared_ptr<const plan::TransferPlan> plan;
  AgreedLayoutPtr source;
  AgreedLayoutPtr target;
  /// AgentHello::features that agents of both sides need to make weights quantized on the way; 0
  /// where they make none.
  uint64_t features = 0;
};
using PlannedPairPtr = std::shared_ptr<const PlannedPair>;

/// What a coordinator computes on its workers: layouts, plans and their slices. All of it is pure;
/// who starts one coordinator after another may override a function by one that remembers what it
/// has answered. Thread-safe.
class Work {
 public:
  virtual ~Work() = default;
  /// Errors: layout::ParseParallelSpec's and LayoutFromScheme's.
  virtual Result<SchemeLayout> Scheme(const std::string& config_json,
                                      const std::string& spec) const;
  /// `scheme` is not looked at where the submission has explicit boxes. Without a model, a trace's
  /// own checkpoint is its canonical space.
  /// Errors: CoordinatorPort::SubmitLayout's.
  virtual Result<RankOffer> Offer(const control::LayoutSubmission& submission,
                                  const SchemeLayout& scheme, uint32_t rank, uint32_t world) const;
  /// Of a submission with `models`, with a scheme for each (layout/models.h).
  /// Errors: Offer's, with the model's name, and layout::JoinModels'.
  Result<RankOffer> OfferModels(const control::LayoutSubmission& submission,
                                const std::vector<SchemeLayout>& schemes) const;
  virtual AgreedLayoutPtr Assemble(
      const layout::CanonicalSpace& canonical,
      const std::vector<std::shared_ptr<const layout::RankLayout>>& ranks) const;
  /// Builds and proves. Errors: layout::CheckTie's and Split's, plan::BuildPlan's and VerifyPlan's;
  /// kFailedPrecondition / kTensorMissing when the target holds nothing of the model, or a model
  /// that the source has not.
  virtual Result<PlannedPairPtr> Plan(const AgreedLayoutPtr& from, const AgreedLayoutPtr& to) const;
  /// `rank` is one of that side.
  virtual std::shared_ptr<const plan::RankSlice> Slice(const plan::TransferPlan& plan,
                                                       plan::Side side, uint32_t rank) const;
};

}  // namespace weightwire::coordinator
