#include <algorithm>

#include "server/base/failpoint.h"
#include "server/coordinator/driver.h"

// An engine that has missed the newest version gets it from another engine. Weights that the holder
// has in another dtype may have been rounded twice on the way, so one that holds them as the
// waiting engine does is preferred; and fp8 weights, which could not even be compared with those of
// other engines, come from fp8 weights only.
namespace weightwire::coordinator {
namespace {

/// The first holder that has all tensors in the dtypes of the first waiting engine that has such a
/// one; only the engines that are like it stay in `waiting`. Without any, the first holder for all.
const Group* ChooseHolder(const std::vector<const Group*>& holders,
                          std::vector<const Group*>& waiting) {
  for (const Group* engine : waiting) {
    const layout::Fingerprint& canonical = engine->canonical_fingerprint;
    const auto like = std::ranges::find(holders, canonical, &Group::canonical_fingerprint);
    if (like == holders.end()) continue;
    std::erase_if(waiting,
                  [&](const Group* other) { return other->canonical_fingerprint != canonical; });
    return *like;
  }
  return holders.front();
}

}  // namespace

void Driver::StartFill() {
  if (fill_ != nullptr || fill_draft_ != nullptr || committed_.epoch == Epoch{}) return;
  std::vector<const Group*> holders;
  std::vector<const Group*> waiting;
  for (const Group* engine : PartakingEngines()) {
    if (engine->serving == committed_.epoch) {
      holders.push_back(engine);
    } else if (engine->fills_failed < s_.options.attempts_max) {
      waiting.push_back(engine);
    }
  }
  if (holders.empty() || waiting.empty()) return;
  const Group* holder = ChooseHolder(holders, waiting);
  const auto number = numbers_.Take();
  if (!number) return;
  WW_FAILPOINT("coordinator.before_a_fill");
  epoch::Spec spec;
  spec.epoch = *number;
  spec.kind = epoch::Kind::kFill;
  spec.version = committed_.version;
  spec.content = committed_.epoch;
  spec.sources = holder->Members();
  spec.source_group = holder->name;
  fill_draft_ = NewDraft(std::move(spec));
  for (const Group* engine : waiting) {
    if (engine->fills_failed > 0) fill_draft_->direct.insert(engine->name);
  }
  Plan(fill_draft_, *holder, waiting);
}

Status Driver::CheckQuantizes(const epoch::Spec& spec, const std::string& engine,
                              const PlannedPair& pair) const {
  if (!pair.quantizes) return OkStatus();
  if (spec.kind == epoch::Kind::kFill) {
    return Status(Code::kFailedPrecondition, Reason::kDtypeMismatch,
                  "its fp8 weights would be made of those of " + spec.source_group +
                      ", which may have been rounded before")
        .Remedy(
            "publish the next version, or start another engine with the same "
            "quantization_config that can fill it");
  }
  const auto lacks = [this](const epoch::Member& member, uint64_t feature) {
    const Session* session = s_.membership.SessionOf(member);
    return session != nullptr && (session->hello.features & feature) == 0;
  };
  const auto refused = [](const std::string& group, size_t rank, std::string what) {
    return Status(Code::kFailedPrecondition, Reason::kProtocolVersion, std::move(what))
        .AtRank(group + "/" + std::to_string(rank))
        .Remedy("run the coordinator's version of weightwired beside it");
  };
  const auto check = [&](const std::string& group, const std::vector<epoch::Member>& ranks) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (!lacks(ranks[rank], control::kFeatureQuantize)) continue;
      return refused(group, rank, "its agent cannot quantize on the way");
    }
    return OkStatus();
  };
  WW_RETURN_IF_ERROR(check(spec.source_group, spec.sources));
  const auto asked = std::ranges::find(spec.engines, engine, &epoch::EngineMembers::name);
  WW_RETURN_IF_ERROR(check(engine, asked->ranks));
  for (const auto& [rank, gathered] : pair.plan->gathered) {
    if (!lacks(asked->ranks[rank], control::kFeatureGather)) continue;
    return refused(engine, rank,
                   "its agent cannot quantize blocks of which no trainer rank holds all");
  }
  return OkStatus();
}

}  // namespace weightwire::coordinator
