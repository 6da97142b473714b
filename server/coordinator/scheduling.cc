#include "server/coordinator/scheduling.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace weightwire::coordinator {

Status Decisions::Check() const {
  if (stopping) {
    return Status(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
  }
  if (deciding) return OkStatus();
  return Status(Code::kUnavailable, Reason::kJournalFailed,
                "the coordinator stopped deciding: " + stopped_why.message())
      .Remedy("repair the journal's storage and restart the coordinator");
}

void Decisions::Set(const CommitRecord& record) {
  std::vector<LineageRun> runs = RunsWith(record);
  committed = record;
  committed.runs = std::move(runs);
}

std::vector<LineageRun> Decisions::RunsWith(const CommitRecord& record) const {
  if (record.newest == kFirstLineage) return {};
  std::vector<LineageRun> runs = committed.runs;
  if (runs.empty()) {
    const bool only = committed.newest == kFirstLineage;
    runs.push_back({Epoch{}, only ? kFirstLineage : 0});
    if (!only && record.held != Epoch{}) {  // of what is held only that is known
      runs.push_back({record.held, record.lineage});
      runs.push_back({Epoch(record.held.value + 1), 0});
    }
  }
  if (runs.back().lineage != record.lineage) runs.push_back({record.epoch, record.lineage});
  if (runs.size() > kLineageRunsMax) {
    runs.erase(runs.begin(), runs.end() - static_cast<ptrdiff_t>(kLineageRunsMax));
  }
  return runs;
}

uint64_t Decisions::LineageOf(Epoch epoch) const {
  if (epoch == Epoch{}) return 0;
  if (committed.newest == kFirstLineage) return kFirstLineage;
  const std::vector<LineageRun>& runs = committed.runs;
  const auto after = std::ranges::upper_bound(runs, epoch, {}, &LineageRun::from);
  return after == runs.begin() ? 0 : std::prev(after)->lineage;
}

VersionId Decisions::Floor() const {
  const bool newest = committed.lineage == committed.newest;
  return {committed.newest, newest ? committed.version : Version{}};
}

Status Decisions::CheckLineage(const control::PublishRequest& request) const {
  const uint64_t asked = std::max(request.lineage, kFirstLineage);
  const uint64_t newest = committed.newest;
  if (committed.epoch == Epoch{} || asked == newest || asked == newest + 1) return OkStatus();
  const std::string on = "lineage=" + std::to_string(newest);
  const std::string next = "lineage=" + std::to_string(newest + 1);
  if (asked > newest) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                  "lineage " + std::to_string(asked) + " does not follow lineage " +
                      std::to_string(newest) + ", the newest that is committed")
        .Remedy(on + " goes on, " + next + " begins a new one");
  }
  return Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "version " + std::to_string(request.version.value) + " is of lineage " +
                    std::to_string(asked) + ", which has ended: " +
                    (committed.lineage == newest ? ToString(Floor()) + " is committed"
                                                 : "lineage " + std::to_string(newest) + " began"))
      .Remedy(
          "stop this trainer if another one went back to an earlier step; one that goes on in "
          "lineage " +
          std::to_string(newest) + " says so, " + on +
          ", and one that goes back itself begins the next, " + next +
          "; in a new process lineage=\"resume\" does either");
}

Shared::Shared(const Services& services, CommitRecord committed, Epoch first, JournalId epochs_of,
               std::function<void()> starts, std::function<void()> changes,
               std::function<void(const Status&)> undecidable)
    : s(services),
      decisions{committed, 0, committed.epoch, first, epochs_of, {}, {}},
      numbers(first, epochs_of, s.journal, starts, std::move(undecidable)),
      stragglers(s, decisions, starts),
      history(s.options.epochs_remembered),
      absent_models(committed.epoch == Epoch{} ? Nanos{} : s.clock.Now() + s.options.lease),
      try_start(std::move(starts)),
      changed(std::move(changes)) {
  decisions.Set(committed);
  for (const uint8_t byte : s.options.random_ticket()) random.seed(random() ^ byte);
}

std::vector<const Group*> Shared::CompleteEngines() const {
  std::vector<const Group*> engines;
  for (const auto& [name, group] : s.membership.groups()) {
    if (group.role == control::GroupRole::kEngine && group.Complete()) engines.push_back(&group);
  }
  return engines;
}

std::vector<const Group*> Shared::PartakingEngines() const {
  std::vector<const Group*> engines = CompleteEngines();
  std::erase_if(engines, [this](const Group* e) { return e->drained || stragglers.Has(*e); });
  return engines;
}

bool Shared::AwaitsAModel(const std::vector<const Group*>& engines, AwaitedModel& awaited) {
  const Group* trainer = s.membership.Trainer();
  const Nanos now = s.clock.Now();
  const Nanos before = awaited.until;
  if (trainer == nullptr ||
      !absent_models.Awaits(*trainer, engines, now, kLeasesForModels * s.options.lease, awaited)) {
    return false;
  }
  if (awaited.until != before) {
    s.strand.PostAfter(awaited.until - now, cancel.Bind([this] { try_start(); }));
  }
  return true;
}

void Shared::SendStale(const Group& engine) {
  for (const epoch::Member& member : engine.Members()) {
    const Session* session = s.membership.SessionOf(member);
    if (session == nullptr || (session->hello.features & control::kFeatureStale) == 0) continue;
    s.membership.Send(member, epoch::StaleCommand{decisions.committed.epoch, member});
  }
}

std::array<uint8_t, 16> OwnTraceId(JournalId history, Epoch epoch) {
  std::array<uint8_t, 16> id{};
  for (size_t i = 0; i < 8; ++i) {
    id[i] = static_cast<uint8_t>(history.value >> (56 - 8 * i));
    id[8 + i] = static_cast<uint8_t>(epoch.value >> (56 - 8 * i));
  }
  return id;
}

}  // namespace weightwire::coordinator
