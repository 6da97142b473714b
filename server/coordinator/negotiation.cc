#include "server/coordinator/negotiation.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "server/base/failpoint.h"
#include "server/layout/models.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kConfigBytesMax = 4 << 20;
constexpr size_t kSpecBytesMax = 256;

Status TooLong(const std::string& what) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded, what);
}

Status CheckLayout(const control::LayoutSubmission& submission) {
  const bool boxes = submission.layout.has_value() && submission.canonical.has_value();
  const bool scheme = !submission.spec.empty() || !submission.trace.empty();
  if (boxes == scheme || submission.layout.has_value() != submission.canonical.has_value()) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "a layout is a scheme with config.json, a trace with config.json, or boxes with "
                  "their canonical space");
  }
  if (submission.config_json.size() > kConfigBytesMax) return TooLong("config.json is too long");
  if (submission.spec.size() > kSpecBytesMax) return TooLong("the parallel spec is too long");
  if (submission.observed.size() > layout::LayoutLimits{}.local_tensors_per_rank_max ||
      submission.checkpoint.size() > layout::LayoutLimits{}.canonical_tensors_max) {
    return TooLong("too many tensors were reported");
  }
  return OkStatus();
}

Status NeedsCheckpoint(Status unknown_model) {
  return Status(std::move(unknown_model))
      .Remedy(
          "say with the trace what tensors the checkpoint has "
          "(Subscriber.bind(checkpoint=), with an agent of this version), or send "
          "explicit layouts");
}

/// Of each model, as the status shows it.
std::string SpecOf(const control::LayoutSubmission& submission) {
  if (submission.models.empty()) return submission.spec;
  std::string specs;
  for (const control::LayoutOfModel& model : submission.models) {
    specs += (specs.empty() ? "" : " ") + model.model;
    if (!model.layout.spec.empty()) specs += "=" + model.layout.spec;
  }
  return specs;
}

}  // namespace

void Negotiation::Submit(control::LayoutSubmission submission, LayoutReplier reply) {
  auto shared = std::make_shared<const control::LayoutSubmission>(std::move(submission));
  if (Status why = CheckSubmission(*shared); !why.ok()) return Refuse(*shared, reply, why);
  GetSchemes(shared, reply, {});
}

void Negotiation::GetSchemes(const Submission& submission, const LayoutReplier& reply,
                             std::vector<SchemeLayout> schemes) {
  const bool one = submission->models.empty();
  if (schemes.size() == (one ? 1 : submission->models.size())) {
    return Compute(submission, std::move(schemes), reply);
  }
  const control::LayoutSubmission& layout =
      one ? *submission : submission->models[schemes.size()].layout;
  auto next = [this, submission, reply, schemes = std::move(schemes),
               &layout](Result<SchemeLayout> scheme) mutable {
    // The trace itself says what the model is, where no family does.
    const bool unknown = !scheme && scheme.error().reason() == Reason::kUnknownModel;
    if (unknown && !layout.checkpoint.empty()) scheme = SchemeLayout{};
    if (!scheme) {
      return Refuse(
          *submission, reply,
          unknown && !layout.trace.empty() ? NeedsCheckpoint(scheme.error()) : scheme.error());
    }
    schemes.push_back(std::move(*scheme));
    GetSchemes(submission, reply, std::move(schemes));
  };
  if (layout.layout) return next(SchemeLayout{});
  // A trace without a scheme needs the canonical space alone; hf has it as checkpoints do.
  schemes_.Get(layout.config_json, layout.spec.empty() ? "hf" : layout.spec,
               cancel_.Bind(std::move(next)));
}

Status Negotiation::CheckSubmission(const control::LayoutSubmission& submission) const {
  WW_ASSIGN_OR_STATUS(const Membership::Place place, membership_.Find(submission.member));
  if (submission.models.empty()) return CheckLayout(submission);
  if (submission.models.size() > layout::kModelsMax) return TooLong("too many models");
  if (place.group->role == control::GroupRole::kEngine && submission.models.size() > 1) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "an engine holds one model")
        .Remedy("register an engine for each model");
  }
  std::set<std::string_view> names;
  for (const control::LayoutOfModel& model : submission.models) {
    WW_RETURN_IF_ERROR(layout::CheckModelName(model.model));
    const auto refused = [&](const std::string& what) {
      return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                    "model " + model.model + ": " + what);
    };
    if (!names.insert(model.model).second) return refused("named twice");
    if (!model.layout.models.empty()) return refused("it has models itself");
    if (model.world_size > place.group->world_size() ||
        (model.world_size > 0 && model.rank >= model.world_size)) {
      return refused("rank " + std::to_string(model.rank) + " of " +
                     std::to_string(model.world_size) + " in a group of " +
                     std::to_string(place.group->world_size()));
    }
    WW_RETURN_IF_ERROR(CheckLayout(model.layout));
  }
  return OkStatus();
}

void Negotiation::Compute(const Submission& submission, std::vector<SchemeLayout> schemes,
                          const LayoutReplier& reply) {
  const auto place = membership_.Find(submission->member);
  if (!place) return Refuse(*submission, reply, place.error());
  auto offered = cancel_.Bind([this, submission, reply](Result<RankOffer> offer) {
    Offered(submission, reply, std::move(offer));
  });
  workers_.Post([submission, schemes = std::move(schemes), work = work_, rank = place->rank,
                 world = place->group->world_size(), offered = std::move(offered),
                 &strand = strand_]() mutable {
    auto offer = submission->models.empty() ? work->Offer(*submission, schemes.front(), rank, world)
                                            : work->OfferModels(*submission, schemes);
    strand.Post([offered = std::move(offered), offer = std::move(offer)]() mutable {
      offered(std::move(offer));
    });
  });
}

void Negotiation::Offered(const Submission& submission, const LayoutReplier& reply,
                          Result<RankOffer> offer) {
  if (!offer) return Refuse(*submission, reply, std::move(offer.error()));
  if (Status why = Agree(*submission, *offer); !why.ok()) {
    return Refuse(*submission, reply, std::move(why));
  }
  WW_FAILPOINT("coordinator.after_layout_agreed_before_answer");
  commands_.Reply<control::LayoutReply>(
      reply,
      control::LayoutReply{offer->layout, offer->canonical_fingerprint, std::move(offer->notes)});
}

Status Negotiation::Agree(const control::LayoutSubmission& submission, const RankOffer& offer) {
  WW_ASSIGN_OR_STATUS(const Membership::Place place, membership_.Find(submission.member));
  Group& group = *place.group;
  Rank& rank = *place.live;
  WW_RETURN_IF_ERROR(CheckPlaces(group, place.rank, offer.places));
  if (group.canonical != nullptr && group.canonical_fingerprint != offer.canonical_fingerprint) {
    return layout::CheckSameModel(*group.canonical, *offer.canonical);
  }
  if (rank.layout != nullptr && *rank.layout == *offer.layout) return OkStatus();
  if (rank.layout != nullptr) {
    return Status(Code::kFailedPrecondition, Reason::kInvalidRequest,
                  "the rank has agreed on another layout already")
        .Remedy("register with a new incarnation to change it");
  }
  group.canonical = offer.canonical;
  group.canonical_fingerprint = offer.canonical_fingerprint;
  rank.layout = offer.layout;
  rank.spec = SpecOf(submission);
  rank.places = offer.places;
  rank.bytes = offer.bytes;
  AssembleWhenComplete(group);
  observer_.OnMembershipChanged();
  return OkStatus();
}

Status Negotiation::CheckPlaces(const Group& group, uint32_t rank,
                                const std::vector<PlaceInModel>& places) {
  if (places.empty()) return OkStatus();
  for (uint32_t other = 0; other < group.world_size(); ++other) {
    const Slot& slot = group.slots[other];
    if (other == rank || !slot.live || slot.live->layout == nullptr) continue;
    for (const PlaceInModel& theirs : slot.live->places) {
      const auto ours = std::ranges::find(places, theirs.model, &PlaceInModel::model);
      if (ours == places.end() || ours->world_size == 0 || theirs.world_size == 0) continue;
      const bool same = ours->rank == theirs.rank;
      if (!same && ours->world_size == theirs.world_size) continue;
      return Status(Code::kFailedPrecondition, Reason::kDuplicateRank,
                    "model " + theirs.model + ": it is rank " + std::to_string(ours->rank) +
                        " of " + std::to_string(ours->world_size) + ", and " +
                        group.RankName(other) + " is rank " + std::to_string(theirs.rank) + " of " +
                        std::to_string(theirs.world_size))
          .Remedy("number the ranks that share a model from 0, each once");
    }
  }
  return OkStatus();
}

void Negotiation::AssembleWhenComplete(Group& group) {
  std::vector<std::shared_ptr<const layout::RankLayout>> ranks;
  for (const Slot& slot : group.slots) {
    if (!slot.connected() || slot.live->layout == nullptr) return;
    ranks.push_back(slot.live->layout);
  }
  auto assembled = cancel_.Bind([this, name = group.name, generation = group.generation,
                                 members = group.Members()](const AgreedLayoutPtr& agreed) {
    Assembled(name, generation, members, agreed);
  });
  workers_.Post([canonical = group.canonical, ranks = std::move(ranks),
                 assembled = std::move(assembled), work = work_, &strand = strand_]() mutable {
    auto agreed = work->Assemble(*canonical, ranks);
    strand.Post([assembled = std::move(assembled), agreed]() mutable { assembled(agreed); });
  });
}

void Negotiation::Assembled(const std::string& name, uint64_t generation,
                            const std::vector<epoch::Member>& members, AgreedLayoutPtr agreed) {
  Group* group = membership_.FindGroup(name);
  if (group == nullptr || group->generation != generation || group->Members() != members) return;
  group->agreed = std::move(agreed);
  group->was_complete = true;
  group->dirty = false;
  group->last_error.clear();
  WW_FAILPOINT("coordinator.after_a_group_is_complete");
  observer_.OnComplete(*group);
  observer_.OnMembershipChanged();
}

void Negotiation::Refuse(const control::LayoutSubmission& submission, const LayoutReplier& reply,
                         Status why) {
  metrics_.Add("layout_rejections_total", 1, {{"reason", std::string(ReasonName(why.reason()))}});
  const auto place = membership_.Find(submission.member);
  if (place) {
    Status named = Status(std::move(why).AtRank(place->name()));
    place->group->last_error = named.ToString();
    return commands_.Reply<control::LayoutReply>(reply, Fail(std::move(named)));
  }
  commands_.Reply<control::LayoutReply>(reply, Fail(std::move(why)));
}

}  // namespace weightwire::coordinator
