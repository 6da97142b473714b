#include "server/coordinator/fill_scheduler.h"

#include <algorithm>

#include "server/base/failpoint.h"
#include "server/coordinator/retry.h"

// An engine that has missed the newest version gets it from another engine. Weights that the holder
// has in another dtype may have been rounded twice on the way, so one that holds them as the
// waiting engine does is preferred; and fp8 weights, which could not even be compared with those of
// other engines, come from fp8 weights only. Where a trainer publishes several models, an engine
// gets its model from an engine that holds it, too.
namespace weightwire::coordinator {
namespace {

/// At a time.
constexpr size_t kFillsMax = 16;

/// The canonical tensors of an engine that is complete, whether dimensions are split or joined.
const layout::Fingerprint& ElementsOf(const Group* engine) { return engine->agreed->elements; }

/// The first holder that has all tensors in the dtypes of the first waiting engine that has such a
/// one; only the engines that are like it stay in `waiting`. Without any, the first holder for all.
const Group* ChooseHolder(const std::vector<const Group*>& holders,
                          std::vector<const Group*>& waiting) {
  for (const Group* engine : waiting) {
    const layout::Fingerprint& elements = ElementsOf(engine);
    const auto like = std::ranges::find(holders, elements, ElementsOf);
    if (like == holders.end()) continue;
    std::erase_if(waiting, [&](const Group* other) { return ElementsOf(other) != elements; });
    return *like;
  }
  return holders.front();
}

/// Leaves those that hold the model of the first of `wanting` that some holder has. False, and
/// nothing has changed: there is none such.
bool KeepOneModel(std::vector<const Group*>& holders, std::vector<const Group*>& wanting) {
  const auto models = [](const Group* engine) -> const std::vector<std::string>& {
    return engine->agreed->models;
  };
  const auto held = [&](const Group* engine) {
    return std::ranges::find(holders, models(engine), models) != holders.end();
  };
  const auto first = std::ranges::find_if(wanting, held);
  if (first == wanting.end()) return false;
  const std::vector<std::string> chosen = models(*first);
  const auto other = [&](const Group* engine) { return models(engine) != chosen; };
  std::erase_if(wanting, other);
  std::erase_if(holders, other);
  return true;
}

}  // namespace

void FillScheduler::Start() {
  if (shared_.decisions.committed.epoch == Epoch{}) return;
  while (runner_.fills().size() + planner_.fills().size() < kFillsMax && StartOne()) {
  }
}

/// True when one begins. Each holder serves one fill at a time; they share those who wait. Who has
/// failed is filled alone, after a pause and from another holder each time, so that it is in
/// nobody's way.
bool FillScheduler::StartOne() {
  const Nanos now = s_.clock.Now();
  const std::unordered_set<std::string_view> busy = InFills();
  std::vector<const Group*> holders, waiting, failed;
  for (const Group* engine : shared_.PartakingEngines()) {
    if (busy.contains(engine->name)) continue;
    const Trouble* trouble = TroubleOf(*engine);
    const bool alone = trouble != nullptr;
    if (trouble != nullptr && (trouble->fits_nobody || now < trouble->not_before)) continue;
    if (engine->serving == shared_.decisions.committed.epoch) {
      holders.push_back(engine);
    } else {
      (alone ? failed : waiting).push_back(engine);
    }
  }
  if (!KeepOneModel(holders, waiting)) {
    waiting.clear();
    if (!KeepOneModel(holders, failed)) return false;
    const auto failures = [this](const Group* engine) {
      const Trouble* trouble = TroubleOf(*engine);
      return trouble == nullptr ? 0 : trouble->failures;
    };
    waiting = {*std::ranges::min_element(failed, {}, failures)};
    const auto turn = static_cast<std::ptrdiff_t>(failures(waiting.front()) % holders.size());
    std::ranges::rotate(holders, holders.begin() + turn);
  }
  const Group* holder = ChooseHolder(holders, waiting);
  waiting.resize((waiting.size() + holders.size() - 1) / holders.size());
  const auto number = shared_.numbers.Take();
  if (!number) return false;
  WW_FAILPOINT("coordinator.before_a_fill");
  epoch::Spec spec;
  spec.epoch = *number;
  spec.kind = epoch::Kind::kFill;
  spec.version = shared_.decisions.committed.version;
  spec.lineage = shared_.decisions.committed.lineage;
  spec.content = shared_.decisions.committed.epoch;
  spec.sources = holder->Members();
  spec.source_group = holder->name;
  planner_.Plan(planner_.NewPending(std::move(spec)), *holder, waiting);
  return true;
}

std::unordered_set<std::string_view> FillScheduler::InFills() const {
  std::unordered_set<std::string_view> names;
  const auto add = [&](const epoch::Spec& spec) {
    names.insert(spec.source_group);
    for (const epoch::EngineMembers& engine : spec.engines) names.insert(engine.name);
  };
  for (const auto& run : runner_.fills()) add(run->state.spec);
  for (const auto& pending : planner_.fills()) add(pending->spec);
  return names;
}

const FillScheduler::Trouble* FillScheduler::TroubleOf(const Group& engine) const {
  const auto found = troubles_.find(engine.name);
  const bool its = found != troubles_.end() && found->second.ranks == engine.Members();
  return its ? &found->second : nullptr;
}

void FillScheduler::Failed(Group& engine, const Status& why) {
  engine.last_error = why.ToString();
  Trouble& trouble = troubles_[engine.name];
  if (trouble.ranks != engine.Members()) trouble = {engine.Members(), 0, {}, false};
  trouble.not_before = PauseOfFill(trouble.failures++, shared_);
}

/// Only who failed is in trouble: the others are filled without it at once. Nobody is when somebody
/// was lost, who will not be there again; everybody when nobody is named.
void FillScheduler::End(const EpochRun& run) {
  const epoch::State& state = run.state;
  if (state.phase == epoch::Phase::kCommitted || state.cause == epoch::AbortCause::kGaveWay ||
      !state.lost.empty())
    return;
  std::vector<epoch::EngineMembers> all = state.spec.engines;
  all.push_back({state.spec.source_group, state.spec.sources});
  const std::string& rank = state.why.rank();
  const std::string named = rank.substr(0, rank.rfind('/'));
  const bool known = std::ranges::find(all, named, &epoch::EngineMembers::name) != all.end();
  for (const epoch::EngineMembers& engine : all) {
    Group* group = s_.membership.FindGroup(engine.name);
    if (group == nullptr || group->Members() != engine.ranks) continue;
    if (!known || engine.name == named) Failed(*group, state.why);
  }
}

bool FillScheduler::GaveWay() {
  planner_.DropFills();
  if (runner_.fills().empty()) return true;
  std::vector<Epoch> giving;
  for (const auto& fill : runner_.fills()) {
    if (fill->CanAbort()) giving.push_back(fill->state.spec.epoch);
  }
  runner_.GiveWay(
      giving, Status(Code::kAborted, Reason::kAbortRequested, "the fill gives way to a new epoch"));
  return false;
}

}  // namespace weightwire::coordinator
