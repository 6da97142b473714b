#include "server/coordinator/negotiation.h"

#include <utility>

#include "server/base/failpoint.h"

namespace weightwire::coordinator {
namespace {

constexpr size_t kConfigBytesMax = 4 << 20;
constexpr size_t kSpecBytesMax = 256;

Status TooLong(const std::string& what) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded, what);
}

}  // namespace

void Negotiation::Submit(control::LayoutSubmission submission, LayoutReplier reply) {
  auto shared = std::make_shared<const control::LayoutSubmission>(std::move(submission));
  if (Status why = CheckSubmission(*shared); !why.ok()) return Refuse(*shared, reply, why);
  if (shared->layout) {
    return Compute(shared, {}, reply);
  }
  // A trace without a scheme needs the canonical space alone; hf has it as checkpoints do.
  schemes_.Get(shared->config_json, shared->spec.empty() ? "hf" : shared->spec,
               cancel_.Bind([this, shared, reply](const Result<SchemeLayout>& scheme) {
                 WithScheme(shared, reply, scheme);
               }));
}

Status Negotiation::CheckSubmission(const control::LayoutSubmission& submission) const {
  WW_RETURN_IF_ERROR([&] {
    const auto place = membership_.Find(submission.member);
    return place ? OkStatus() : place.error();
  }());
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

void Negotiation::WithScheme(const Submission& submission, const LayoutReplier& reply,
                             const Result<SchemeLayout>& scheme) {
  if (scheme) return Compute(submission, *scheme, reply);
  // The trace itself says what the model is, where no family does.
  const bool unknown = scheme.error().reason() == Reason::kUnknownModel;
  if (unknown && !submission->checkpoint.empty()) return Compute(submission, {}, reply);
  if (!unknown || submission->trace.empty()) return Refuse(*submission, reply, scheme.error());
  Refuse(*submission, reply,
         Status(scheme.error())
             .Remedy("say with the trace what tensors the checkpoint has "
                     "(Subscriber.bind(checkpoint=), with an agent of this version), or send "
                     "explicit layouts"));
}

void Negotiation::Compute(const Submission& submission, const SchemeLayout& scheme,
                          const LayoutReplier& reply) {
  const auto place = membership_.Find(submission->member);
  if (!place) return Refuse(*submission, reply, place.error());
  auto offered = cancel_.Bind([this, submission, reply](Result<RankOffer> offer) {
    Offered(submission, reply, std::move(offer));
  });
  workers_.Post([submission, scheme, work = work_, rank = place->rank,
                 world = place->group->world_size(), offered = std::move(offered),
                 &strand = strand_]() mutable {
    auto offer = work->Offer(*submission, scheme, rank, world);
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
  rank.spec = submission.spec;
  rank.bytes = offer.bytes;
  AssembleWhenComplete(group);
  observer_.OnMembershipChanged();
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
