#include "server/coordinator/stragglers.h"

#include <algorithm>
#include <utility>

namespace weightwire::coordinator {

bool Stragglers::Has(const Group& engine) const {
  const Straggler* straggler = Find(engine.name);
  return straggler != nullptr && engine.Complete() && straggler->ranks == engine.Members();
}

const Straggler* Stragglers::Find(const std::string& engine) const {
  const auto found = by_engine_.find(engine);
  return found == by_engine_.end() ? nullptr : &found->second;
}

void Stragglers::Put(const std::string& engine, Straggler straggler) {
  straggler.turn = ++turns_;
  by_engine_[engine] = std::move(straggler);
  RemindLater(engine, turns_);
}

void Stragglers::AwaitSwap(const std::string& engine, Straggler straggler) {
  const Nanos patience = straggler.patience - s_.clock.Now();
  Put(engine, std::move(straggler));
  Ask(*Find(engine));
  s_.strand.PostAfter(std::max(Nanos(0), patience), cancel_.Bind([this] { patience_over_(); }));
}

void Stragglers::OnDurable(Epoch content) {
  for (const auto& [name, straggler] : by_engine_) {
    if (straggler.content.epoch == content) Ask(straggler);
  }
}

/// The engine answers at last: it has what the others had then, and is filled with what is newer.
bool Stragglers::OnReport(const epoch::Report& report) {
  const auto* applied = std::get_if<epoch::SwappedReport>(&report);
  const auto* failed = std::get_if<epoch::FailedReport>(&report);
  if (applied == nullptr && failed == nullptr) return false;
  const auto place = s_.membership.Find(applied != nullptr ? applied->member : failed->member);
  if (!place || place->rank != 0 || !Has(*place->group)) return false;
  const std::string name = place->group->name;
  const Straggler straggler = *Find(name);
  if (straggler.epoch != (applied != nullptr ? applied->epoch : failed->epoch)) return false;
  Erase(name);
  if (failed != nullptr) {
    s_.membership.Evict(failed->member, failed->why);
  } else {
    Install({name, straggler.ranks}, straggler.epoch, straggler.content, straggler.keeps);
  }
  return true;
}

bool Stragglers::IsAwaited(const Group& engine) const {
  return Has(engine) && s_.clock.Now() < Find(engine.name)->patience;
}

bool Stragglers::AnyAwaited() const {
  return std::ranges::any_of(by_engine_, [&](const auto& entry) {
    const Group* engine = s_.membership.FindGroup(entry.first);
    return engine != nullptr && IsAwaited(*engine);
  });
}

void Stragglers::Ask(const Straggler& straggler) const {
  if (straggler.content.epoch > decisions_.committed.epoch) return;  // it is when that is durable
  SendCommits(straggler.ranks, straggler.epoch, straggler.content);
}

/// Asked again, a leader that has swapped or refused says so again.
void Stragglers::RemindLater(const std::string& engine, uint64_t turn) {
  s_.strand.PostAfter(s_.options.commit_deadline, cancel_.Bind([this, engine, turn] {
    const Straggler* still = Find(engine);
    if (still == nullptr || still->turn != turn) return;
    Ask(*still);
    RemindLater(engine, turn);
  }));
}

void Stragglers::SendCommits(const std::vector<epoch::Member>& ranks, Epoch epoch,
                             const epoch::Content& content) const {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    s_.membership.Send(ranks[rank], epoch::CommitCommand{epoch, content.version, content.epoch,
                                                         ranks[rank], rank == 0});
  }
}

void Stragglers::Install(const epoch::EngineMembers& engine, Epoch epoch,
                         const epoch::Content& content,
                         const std::map<epoch::Member, epoch::Contents>& keeps) {
  for (const epoch::Member& member : engine.ranks) {
    s_.membership.Send(member, epoch::CommittedEverywhereCommand{epoch, member});
  }
  Group* group = s_.membership.FindGroup(engine.name);
  if (group == nullptr || group->Members() != engine.ranks) return;
  Erase(engine.name);
  for (const epoch::Member& member : engine.ranks) {
    const auto kept = keeps.find(member);
    s_.membership.Hold(member, kept == keeps.end() ? epoch::Contents{} : kept->second);
  }
  if (content.epoch < group->serving) {
    s_.metrics.Add("invariant_violations_total", 1, {{"id", "I4"}});
  }
  group->serving = content.epoch;
  group->version = content.version;
}

}  // namespace weightwire::coordinator
