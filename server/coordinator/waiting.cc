#include "server/coordinator/waiting.h"

#include <algorithm>
#include <chrono>

namespace weightwire::coordinator {
namespace {

double SecondsOf(Nanos span) { return std::chrono::duration<double>(span).count(); }

/// Why the rank's place is not what it should be.
std::string LackOf(const Group& group, uint32_t rank) {
  const Slot& slot = group.slots[rank];
  std::string lack = group.RankName(rank) + ": ";
  if (!slot.live) return lack + "register";
  if (!slot.connected()) return lack + std::string(PresenceName(slot.live->presence));
  return lack + (slot.live->layout == nullptr ? "layout" : "silent");
}

}  // namespace

std::string Joined(const std::vector<std::string>& lines, size_t more) {
  std::string text;
  const size_t shown = std::min(lines.size(), kLinesJoined);
  for (size_t i = 0; i < shown; ++i) {
    text += (i == 0 ? "" : ", ") + lines[i];
  }
  more += lines.size() - shown;
  if (more > 0) text += " and " + std::to_string(more) + " more";
  return text;
}

double SilentSeconds(const Shared& shared, const epoch::Member& member) {
  const auto place = shared.s.membership.Find(member);
  if (!place) return 0;
  if (place->live->presence != Presence::kConnected) {
    return std::max(0.001, SecondsOf(shared.s.clock.Now() - place->live->cut_at));
  }
  const Session* session = shared.s.membership.SessionOf(member);
  const Nanos silent = session == nullptr ? Nanos{} : shared.s.clock.Now() - session->heard;
  return silent > shared.s.options.heartbeat * 5 / 2 ? SecondsOf(silent) : 0;
}

std::vector<std::string> SilentLines(const Shared& shared) {
  std::vector<std::string> lines;
  for (const auto& [name, group] : shared.s.membership.groups()) {
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      const Slot& slot = group.slots[rank];
      if (slot.live && SilentSeconds(shared, slot.live->member) > 0)
        lines.push_back(LackOf(group, rank));
    }
  }
  return lines;
}

std::vector<TroubleStatus> TroublesOf(const Shared& shared) {
  std::vector<TroubleStatus> found;
  for (const auto& [id, session] : shared.s.membership.sessions()) {
    for (const control::Trouble& trouble : session.beat.troubles) {
      std::string where = session.hello.name;
      if (trouble.member != epoch::Member{}) {
        const auto place = shared.s.membership.Find(trouble.member);
        if (!place || place->live->agent != id) continue;
        where = place->name();
      }
      found.push_back({std::move(where), session.hello.name, trouble.what, trouble.remedy});
    }
  }
  return found;
}

std::vector<std::string> MissingLines(const Shared& shared, control::GroupRole role,
                                      bool gone_too) {
  std::vector<std::string> lines;
  for (const auto& [name, group] : shared.s.membership.groups()) {
    if (group.role != role || group.Complete()) continue;
    if (!gone_too && (group.present() == 0 || group.drained)) continue;
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      const Slot& slot = group.slots[rank];
      if (!slot.connected() || slot.live->layout == nullptr) lines.push_back(LackOf(group, rank));
    }
  }
  return lines;
}

std::string WaitingEnginesLine(const Shared& shared, size_t wanted) {
  const std::vector<std::string> missing = MissingLines(shared, control::GroupRole::kEngine, true);
  std::vector<std::string> drained, stragglers;
  for (const Group* engine : shared.CompleteEngines()) {
    if (engine->drained) drained.push_back(engine->name);
    if (shared.stragglers.Has(*engine)) stragglers.push_back(engine->name);
  }
  return std::to_string(shared.PartakingEngines().size()) + " of " + std::to_string(wanted) +
         " engines are complete" + (missing.empty() ? "" : "; " + Joined(missing)) +
         (drained.empty() ? "" : "; drained: " + Joined(drained)) +
         (stragglers.empty() ? "" : "; have not swapped yet: " + Joined(stragglers));
}

}  // namespace weightwire::coordinator
