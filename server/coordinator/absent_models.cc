#include "server/coordinator/absent_models.h"

#include <algorithm>

namespace weightwire::coordinator {

void AbsentModels::CutOff(const Group& engine, Nanos until) {
  if (engine.role != control::GroupRole::kEngine) return;
  if (engine.agreed == nullptr) {
    all_until_ = std::max(all_until_, until);
    return;
  }
  for (const std::string& model : engine.agreed->models) {
    until_[model] = std::max(until_[model], until);
  }
}

bool AbsentModels::Awaits(const Group& trainer, const std::vector<const Group*>& engines, Nanos now,
                          Nanos longest, AwaitedModel& awaited) const {
  awaited.until = Nanos{};
  if (trainer.agreed == nullptr || trainer.agreed->models.size() < 2) return false;
  for (const std::string& model : trainer.agreed->models) {
    const auto holds = [&](const Group* engine) {
      return std::ranges::find(engine->agreed->models, model) != engine->agreed->models.end();
    };
    if (std::ranges::any_of(engines, holds)) continue;
    const auto cut_off = until_.find(model);
    const Nanos until =
        cut_off == until_.end() ? all_until_ : std::max(all_until_, cut_off->second);
    if (until <= now || until <= awaited.until) continue;
    awaited.name = model;
    awaited.until = until;
  }
  if (!awaited.IsAwaited(now)) return false;
  if (awaited.latest == Nanos{}) awaited.latest = now + longest;
  awaited.until = std::min(awaited.until, awaited.latest);
  return awaited.IsAwaited(now);
}

}  // namespace weightwire::coordinator
