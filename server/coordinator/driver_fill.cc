#include <algorithm>

#include "server/base/failpoint.h"
#include "server/coordinator/driver.h"

// An engine that has missed the newest version gets it from another engine. Weights that the holder
// has in another dtype may have been rounded twice on the way, so one that holds them as the
// waiting engine does is preferred; and fp8 weights, which could not even be compared with those of
// other engines, come from fp8 weights only.
namespace weightwire::coordinator {
namespace {

/// At a time.
constexpr size_t kFillsMax = 16;
constexpr Nanos kPauseFirst = std::chrono::milliseconds(200);
constexpr Nanos kPauseMost = std::chrono::seconds(30);

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

void Driver::StartFills() {
  if (committed_.epoch == Epoch{}) return;
  while (fills_.size() + fill_drafts_.size() < kFillsMax && StartFill()) {
  }
}

/// True when one begins. Each holder serves one fill at a time; they share those who wait. Who has
/// failed is filled alone, after a pause and from another holder each time, so that it is in
/// nobody's way.
bool Driver::StartFill() {
  const Nanos now = s_.clock.Now();
  std::vector<const Group*> holders, waiting, failed;
  for (const Group* engine : PartakingEngines()) {
    if (InFill(engine->name)) continue;
    const FillTrouble* trouble = TroubleOf(*engine);
    const bool alone = trouble != nullptr;
    if (trouble != nullptr && (trouble->fits_nobody || now < trouble->not_before)) continue;
    if (engine->serving == committed_.epoch) {
      holders.push_back(engine);
    } else {
      (alone ? failed : waiting).push_back(engine);
    }
  }
  if (holders.empty() || (waiting.empty() && failed.empty())) return false;
  if (waiting.empty()) {
    const auto failures = [this](const Group* engine) {
      const FillTrouble* trouble = TroubleOf(*engine);
      return trouble == nullptr ? 0 : trouble->failures;
    };
    waiting = {*std::ranges::min_element(failed, {}, failures)};
    const auto turn = static_cast<std::ptrdiff_t>(failures(waiting.front()) % holders.size());
    std::ranges::rotate(holders, holders.begin() + turn);
  }
  const Group* holder = ChooseHolder(holders, waiting);
  waiting.resize((waiting.size() + holders.size() - 1) / holders.size());
  const auto number = numbers_.Take();
  if (!number) return false;
  WW_FAILPOINT("coordinator.before_a_fill");
  epoch::Spec spec;
  spec.epoch = *number;
  spec.kind = epoch::Kind::kFill;
  spec.version = committed_.version;
  spec.content = committed_.epoch;
  spec.sources = holder->Members();
  spec.source_group = holder->name;
  const auto draft = fill_drafts_.emplace_back(NewDraft(std::move(spec)));
  Plan(draft, *holder, waiting);
  return true;
}

bool Driver::InFill(const std::string& engine) const {
  const auto has = [&](const epoch::Spec& spec) {
    return spec.source_group == engine ||
           std::ranges::find(spec.engines, engine, &epoch::EngineMembers::name) !=
               spec.engines.end();
  };
  return std::ranges::any_of(fills_, [&](const auto& run) { return has(run->state.spec); }) ||
         std::ranges::any_of(fill_drafts_, [&](const auto& draft) { return has(draft->spec); });
}

const Driver::FillTrouble* Driver::TroubleOf(const Group& engine) const {
  const auto found = fill_troubles_.find(engine.name);
  const bool its = found != fill_troubles_.end() && found->second.ranks == engine.Members();
  return its ? &found->second : nullptr;
}

void Driver::Trouble(Group& engine, const Status& why) {
  engine.last_error = why.ToString();
  FillTrouble& trouble = fill_troubles_[engine.name];
  if (trouble.ranks != engine.Members()) trouble = {engine.Members(), 0, {}, false};
  trouble.not_before = s_.clock.Now() + Pause(trouble.failures++, kPauseFirst, kPauseMost);
}

/// Only who failed is in trouble: the others are filled without it at once. Nobody is when somebody
/// was lost, who will not be there again; everybody when nobody is named.
void Driver::EndFill(const EpochRun& run) {
  const epoch::State& state = run.state;
  if (state.phase == epoch::Phase::kCommitted || run.dropped || !state.lost.empty()) return;
  std::vector<epoch::EngineMembers> all = state.spec.engines;
  all.push_back({state.spec.source_group, state.spec.sources});
  const std::string& rank = state.why.rank();
  const std::string named = rank.substr(0, rank.rfind('/'));
  const bool known = std::ranges::find(all, named, &epoch::EngineMembers::name) != all.end();
  for (const epoch::EngineMembers& engine : all) {
    Group* group = s_.membership.FindGroup(engine.name);
    if (group == nullptr || group->Members() != engine.ranks) continue;
    if (!known || engine.name == named) Trouble(*group, state.why);
  }
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
