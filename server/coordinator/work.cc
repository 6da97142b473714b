#include "server/coordinator/work.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/layout/joined.h"
#include "server/layout/models.h"
#include "server/layout/trace_head.h"

namespace weightwire::coordinator {
namespace {

Result<RankOffer> Sized(layout::RankLayout rank,
                        std::shared_ptr<const layout::CanonicalSpace> canonical,
                        layout::Fingerprint canonical_fingerprint) {
  int64_t bytes = 0;
  for (const layout::LocalTensor& tensor : rank.tensors) {
    const auto size = layout::StorageBytes(tensor.dtype, tensor.shape);
    if (!size || __builtin_add_overflow(bytes, *size, &bytes)) {
      return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow,
                         "the rank's bytes do not fit 64 bits")
                      .AtTensor(tensor.name));
    }
  }
  return RankOffer{std::make_shared<const layout::RankLayout>(std::move(rank)),
                   std::move(canonical),
                   canonical_fingerprint,
                   bytes,
                   {}};
}

/// `canonical` with the shapes of checkpoints; null where they are its own. Adapters (lora=) are no
/// tensors of a checkpoint and have theirs.
Result<std::shared_ptr<const layout::CanonicalSpace>> StoredAs(
    const layout::CanonicalSpace& canonical, const std::string& config_json) {
  WW_ASSIGN(const layout::CanonicalSpace stored, layout::StoredFromConfig(config_json));
  std::shared_ptr<layout::CanonicalSpace> own;
  for (size_t t = 0; t < canonical.tensors.size(); ++t) {
    const auto found = stored.Find(canonical.tensors[t].name);
    if (!found || stored.tensors[*found].shape == canonical.tensors[t].shape) continue;
    if (own == nullptr) own = std::make_shared<layout::CanonicalSpace>(canonical);
    own->tensors[t].shape = stored.tensors[*found].shape;
  }
  return own;
}

/// What a trace tells of a model that no family describes.
Result<SchemeLayout> FromCheckpoint(const control::LayoutSubmission& submission) {
  WW_ASSIGN(layout::CanonicalSpace made,
            layout::CanonicalFromCheckpoint(submission.config_json, submission.checkpoint));
  WW_FAIL_IF_ERROR(layout::CheckHeadIsKnown(submission.config_json, made, submission.trace));
  auto canonical = std::make_shared<const layout::CanonicalSpace>(std::move(made));
  return SchemeLayout{nullptr, canonical, layout::FingerprintOf(*canonical), canonical, {}};
}

/// Of a quantized model whose layout no scheme describes, the family's tensors, which say what can
/// be made on the way; of others those that the checkpoint has.
Result<SchemeLayout> WithoutScheme(const control::LayoutSubmission& submission) {
  auto made = layout::CanonicalFromConfig(submission.config_json);
  if (!made || std::ranges::all_of(made->tensors, [](const layout::TensorSpec& tensor) {
        return tensor.block.empty();
      })) {
    return FromCheckpoint(submission);
  }
  auto canonical = std::make_shared<const layout::CanonicalSpace>(std::move(*made));
  WW_ASSIGN(auto stored, StoredAs(*canonical, submission.config_json));
  WW_ASSIGN(std::vector<std::string> notes, layout::NotesOfConfig(submission.config_json));
  return SchemeLayout{nullptr, canonical, layout::FingerprintOf(*canonical),
                      stored ? stored : canonical, std::move(notes)};
}

/// The loader saw tensors as checkpoints store them; its layout is agreed as the model has them.
Result<RankOffer> FromTrace(const control::LayoutSubmission& submission, const SchemeLayout& scheme,
                            uint32_t rank) {
  WW_ASSIGN(layout::RankLayout traced, layout::LayoutFromTrace(*scheme.stored, submission.trace));
  const auto splits = layout::SplitsBetween(*scheme.stored, *scheme.canonical).first;
  if (!splits.empty()) {
    WW_ASSIGN(traced, layout::Split(traced, splits));
  }
  std::vector<std::string> notes = scheme.notes;
  if (!submission.spec.empty() && scheme.model == nullptr) {
    notes.push_back(
        "no scheme describes this engine's model: the recorded loader was compared with nothing");
  } else if (!submission.spec.empty()) {
    std::ranges::move(layout::CompareTrace(*scheme.canonical, traced, scheme.model->ranks[rank]),
                      std::back_inserter(notes));
  }
  WW_ASSIGN(layout::RankLayout bound, layout::BindTrace(std::move(traced), submission.observed));
  WW_FAIL_IF_ERROR(layout::ValidateRank(*scheme.canonical, bound));
  WW_ASSIGN(RankOffer offer,
            Sized(std::move(bound), scheme.canonical, scheme.canonical_fingerprint));
  offer.notes = std::move(notes);
  return offer;
}

Result<RankOffer> FromScheme(const control::LayoutSubmission& submission,
                             const SchemeLayout& scheme, uint32_t rank, uint32_t world) {
  if (scheme.model == nullptr) {
    WW_ASSIGN(const SchemeLayout own, WithoutScheme(submission));
    return FromTrace(submission, own, rank);
  }
  if (!submission.spec.empty() && scheme.model->ranks.size() != world) {
    return Fail(
        Status(Code::kInvalidArgument, Reason::kInvalidRequest,
               "'" + submission.spec + "' has " + std::to_string(scheme.model->ranks.size()) +
                   " ranks, but the group registered with world_size " + std::to_string(world))
            .Remedy("correct the parallel spec or the world size"));
  }
  if (!submission.trace.empty()) return FromTrace(submission, scheme, rank);
  WW_ASSIGN(layout::RankLayout agreed,
            layout::Reconcile(scheme.model->ranks[rank], submission.observed));
  WW_ASSIGN(RankOffer offer,
            Sized(std::move(agreed), scheme.canonical, scheme.canonical_fingerprint));
  offer.notes = scheme.notes;
  return offer;
}

Result<RankOffer> Explicit(const control::LayoutSubmission& submission) {
  WW_FAIL_IF_ERROR(layout::Validate(layout::ModelLayout{*submission.canonical, {}}));
  WW_FAIL_IF_ERROR(layout::ValidateRank(*submission.canonical, *submission.layout));
  auto canonical = std::make_shared<const layout::CanonicalSpace>(*submission.canonical);
  return Sized(*submission.layout, canonical, layout::FingerprintOf(*canonical));
}

/// Of a rank that says only what tensors the model has.
Result<RankOffer> OfferNothing(const control::LayoutSubmission& submission,
                               const SchemeLayout& scheme) {
  if (!submission.observed.empty() || !submission.trace.empty() ||
      (submission.layout && !submission.layout->tensors.empty())) {
    return Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                "world_size is 0, and yet the rank reports tensors");
  }
  if (submission.layout) return Explicit(submission);
  if (scheme.canonical == nullptr) {
    return Fail(
        Code::kInvalidArgument, Reason::kInvalidRequest,
        "a rank that has nothing of a model gives its config.json, or its tensors as boxes");
  }
  return Sized({}, scheme.canonical, scheme.canonical_fingerprint);
}

/// The error with the model's name where it names a tensor or says what is wrong.
Status InModel(const std::string& model, Status why) {
  const std::string& tensor = why.tensor();
  return Status(why.code(), why.reason(), "model " + model + ": " + why.message())
      .AtTensor(tensor.empty() ? "" : layout::NameInModel(model, tensor))
      .AtRank(why.rank())
      .Remedy(why.remedy());
}

AgreedLayoutPtr Agreed(layout::ModelLayout model) {
  auto agreed = std::make_shared<AgreedLayout>();
  agreed->fingerprint = layout::FingerprintOf(model);
  agreed->elements = layout::ElementsFingerprintOf(model.canonical);
  agreed->models = layout::ModelsOf(model.canonical);
  agreed->model = std::move(model);
  return agreed;
}

/// `layout` with the shapes that the other side has.
Result<AgreedLayoutPtr> Split(const AgreedLayoutPtr& layout,
                              std::span<const layout::SplitTensor> splits) {
  if (splits.empty()) return layout;
  WW_ASSIGN(layout::ModelLayout model, layout::Split(layout->model, splits));
  return Agreed(std::move(model));
}

std::string ListOf(const std::vector<std::string>& models) {
  std::string list;
  for (const std::string& model : models) list += (list.empty() ? "" : ", ") + model;
  return list;
}

/// Each model of the target is one of the source's.
Status CheckModels(const AgreedLayout& source, const AgreedLayout& target) {
  for (const std::string& model : target.models) {
    if (std::ranges::binary_search(source.models, model)) continue;
    const auto refused = [](std::string message) {
      return Status(Code::kFailedPrecondition, Reason::kTensorMissing, std::move(message));
    };
    if (model.empty()) {
      return refused(
                 "the trainer publishes several models, and the engine does not say which it "
                 "holds: " +
                 ListOf(source.models))
          .Remedy("name one of them with the engine's layout (model_name)");
    }
    const std::string holds = "the engine holds the model \"" + model + "\"; ";
    const bool unnamed = source.models == std::vector<std::string>{""};
    return refused(holds + (unnamed ? "the trainer publishes one model, which has no name"
                                    : "the trainer publishes " + ListOf(source.models)))
        .Remedy(unnamed ? "name no model with the engine's layout (model_name)"
                        : "name one of these with the engine's layout (model_name)");
  }
  return OkStatus();
}

bool Quantizes(const plan::TransferPlan& plan) {
  if (!plan.gathered.empty()) return true;
  return std::ranges::any_of(plan.streams, [](const plan::Stream& stream) {
    return std::ranges::any_of(stream.ops, [](const plan::CopyOp& op) {
      return op.transform != plan::Transform::kElements;
    });
  });
}

/// What an agent must know to make the quantized weights of this space.
uint64_t FeaturesToMake(const layout::CanonicalSpace& canonical) {
  using layout::ScaleRule;
  uint64_t features = control::kFeatureQuantize;
  for (const layout::TensorSpec& tensor : canonical.tensors) {
    const ScaleRule rule = tensor.scale_rule;
    if (rule != ScaleRule::kQuotient) features |= control::kFeatureScaleRules;
    if (layout::IsFourBit(rule)) features |= control::kFeatureFourBits;
    if (rule == ScaleRule::kOwnQuotient) features |= control::kFeatureOwnQuotient;
  }
  return features;
}

}  // namespace

Result<SchemeLayout> Work::Scheme(const std::string& config_json, const std::string& spec) const {
  WW_ASSIGN(const layout::ParallelSpec parsed, layout::ParseParallelSpec(spec));
  WW_ASSIGN(layout::ModelLayout model, layout::LayoutFromScheme(config_json, parsed));
  auto shared = std::make_shared<const layout::ModelLayout>(std::move(model));
  auto canonical = std::shared_ptr<const layout::CanonicalSpace>(shared, &shared->canonical);
  WW_ASSIGN(auto stored, StoredAs(*canonical, config_json));
  WW_ASSIGN(std::vector<std::string> notes, layout::NotesOfConfig(config_json));
  return SchemeLayout{shared, canonical, layout::FingerprintOf(*canonical),
                      stored ? stored : canonical, std::move(notes)};
}

Result<RankOffer> Work::Offer(const control::LayoutSubmission& submission,
                              const SchemeLayout& scheme, uint32_t rank, uint32_t world) const {
  return submission.layout ? Explicit(submission) : FromScheme(submission, scheme, rank, world);
}

Result<RankOffer> Work::OfferModels(const control::LayoutSubmission& submission,
                                    const std::vector<SchemeLayout>& schemes) const {
  std::vector<layout::RankOfModel> models;
  RankOffer joined;
  for (size_t m = 0; m < submission.models.size(); ++m) {
    const control::LayoutOfModel& of = submission.models[m];
    auto offer = of.world_size > 0 ? Offer(of.layout, schemes[m], of.rank, of.world_size)
                                   : OfferNothing(of.layout, schemes[m]);
    if (!offer) return Fail(InModel(of.model, std::move(offer.error())));
    joined.places.push_back({of.model, of.rank, of.world_size});
    for (const std::string& note : offer->notes) joined.notes.push_back(of.model + ": " + note);
    joined.bytes += offer->bytes;
    models.push_back({of.model, offer->canonical, offer->layout});
  }
  WW_ASSIGN(layout::JoinedModels made, layout::JoinModels(models));
  joined.canonical_fingerprint = layout::FingerprintOf(made.canonical);
  joined.canonical = std::make_shared<const layout::CanonicalSpace>(std::move(made.canonical));
  joined.layout = std::make_shared<const layout::RankLayout>(std::move(made.rank));
  return joined;
}

AgreedLayoutPtr Work::Assemble(
    const layout::CanonicalSpace& canonical,
    const std::vector<std::shared_ptr<const layout::RankLayout>>& ranks) const {
  layout::ModelLayout model{canonical, {}};
  for (const auto& rank : ranks) model.ranks.push_back(*rank);
  return Agreed(std::move(model));
}

Result<PlannedPairPtr> Work::Plan(const AgreedLayoutPtr& from, const AgreedLayoutPtr& to) const {
  WW_FAIL_IF_ERROR(CheckModels(*from, *to));
  WW_FAIL_IF_ERROR(layout::CheckTie(from->model.canonical, to->model.canonical));
  const auto splits = layout::SplitsBetween(from->model.canonical, to->model.canonical);
  WW_ASSIGN(const AgreedLayoutPtr source, Split(from, splits.first));
  WW_ASSIGN(const AgreedLayoutPtr target, Split(to, splits.second));
  WW_ASSIGN(plan::TransferPlan built, plan::BuildPlan(source->model, target->model));
  if (built.streams.empty()) {
    return Fail(Code::kFailedPrecondition, Reason::kTensorMissing,
                "the target holds no tensor of the model");
  }
  WW_FAIL_IF_ERROR(plan::VerifyPlan(built, source->model, target->model));
  const uint64_t features = Quantizes(built) ? FeaturesToMake(target->model.canonical) : 0;
  return std::make_shared<const PlannedPair>(PlannedPair{
      std::make_shared<const plan::TransferPlan>(std::move(built)), source, target, features});
}

std::shared_ptr<const plan::RankSlice> Work::Slice(const plan::TransferPlan& plan, plan::Side side,
                                                   uint32_t rank) const {
  return std::make_shared<const plan::RankSlice>(plan::SliceOf(plan, side, rank));
}

}  // namespace weightwire::coordinator
