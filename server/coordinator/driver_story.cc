#include <algorithm>
#include <utility>

#include "server/coordinator/driver.h"

// What the driver tells of its epochs: to the story that people ask for, and to the log. Nothing
// here decides anything.
namespace weightwire::coordinator {
namespace {

const char* kKindNames[] = {"", "publish", "fill", "rollback"};

std::string Seconds(double seconds) {
  std::string text = std::to_string(seconds);
  return text.substr(0, text.find('.') + 4) + " s";
}

std::string EnginesText(const EpochRun& run) {
  std::string text;
  for (const auto& engine : run.state.spec.engines) {
    text += (text.empty() ? "" : ", ") + engine.name;
  }
  for (size_t i = 0; i < run.left_out.size(); ++i) {
    text += (i == 0 ? "; without " : ", ") + run.left_out[i];
  }
  return text;
}

/// What a report says of its sender, in one word, and why.
struct WordOf {
  std::pair<const char*, Status> operator()(const epoch::PreparedReport&) const {
    return {"prepared", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::SourcedReport&) const {
    return {"sourced", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::StagedReport&) const {
    return {"staged", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::AppliedReport&) const {
    return {"swapped", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::DrainedReport&) const {
    return {"drained", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::FailedReport& r) const {
    return {r.refused ? "refused" : "failed", r.why};
  }
  std::pair<const char*, Status> operator()(const epoch::LostReport& r) const {
    return {"lost", r.why};
  }
  std::pair<const char*, Status> operator()(const epoch::AttestedReport&) const {
    return {"attested", {}};
  }
};

}  // namespace

/// Of an epoch that nobody outside has given a trace: unique among all coordinators of the journal.
std::array<uint8_t, 16> Driver::OwnTraceId(Epoch epoch) const {
  std::array<uint8_t, 16> id{};
  for (size_t i = 0; i < 8; ++i) {
    id[i] = static_cast<uint8_t>(history_number_.value >> (56 - 8 * i));
    id[8 + i] = static_cast<uint8_t>(epoch.value >> (56 - 8 * i));
  }
  return id;
}

void Driver::ToldToPublish(Draft& draft, const PendingVersion& pending,
                           const Group& trainer) const {
  if (pending.attempts > 1 || pending.published.empty()) return;
  Nanos first = pending.published.begin()->second, last = first;
  for (const auto& [rank, at] : pending.published) {
    first = std::min(first, at);
    last = std::max(last, at);
    draft.story.Happened(at, trainer.RankName(rank), "published", {});
  }
  draft.story.Step("publish", "version " + std::to_string(pending.version.value), first, last);
}

void Driver::Log(const EpochRun& run, std::string text, bool bad) const {
  const epoch::Spec& spec = run.state.spec;
  s_.options.notes({spec.epoch, spec.version, run.trace_id, "", bad, std::move(text)});
}

void Driver::NoteBeginning(const EpochRun& run) const {
  Log(run,
      std::string(kKindNames[static_cast<int>(run.state.spec.kind)]) + " begins, try " +
          std::to_string(run.attempt) + ", for " + EnginesText(run),
      false);
}

void Driver::NotePhase(EpochRun& run, epoch::Phase left, double seconds) const {
  const epoch::Phase now = run.state.phase;
  if (now == epoch::Phase::kAborting) {
    run.story.Happened(s_.clock.Now(), "coordinator", "aborts", run.state.why);
  }
  if (now == epoch::Phase::kCommitted || now == epoch::Phase::kAborted) return;
  Log(run,
      std::string(epoch::PhaseName(now)) + " after " + Seconds(seconds) + " of " +
          std::string(epoch::PhaseName(left)) +
          (run.state.why.ok() ? "" : ": " + run.state.why.ToString()),
      !run.state.why.ok());
}

void Driver::NoteReport(EpochRun& run, const epoch::Report& report) {
  const epoch::Member member = std::visit([](const auto& r) { return r.member; }, report);
  const auto name = run.names.find(member);
  if (name == run.names.end()) return;
  const auto [what, why] = std::visit(WordOf{}, report);
  const Nanos now = s_.clock.Now();
  run.story.Happened(now, name->second, what, why);
  const Session* session = s_.membership.SessionOf(member);
  std::visit(
      [&](const auto& r) {
        if constexpr (requires { r.spans; }) {
          if (session == nullptr) return;
          run.story.Reported(name->second, session->hello.name, r.spans, now);
        }
      },
      report);
}

void Driver::NoteLoss(EpochRun& run, const epoch::Member& member, const Status& why) const {
  const auto name = run.names.find(member);
  if (name != run.names.end()) run.story.Happened(s_.clock.Now(), name->second, "lost", why);
}

void Driver::NoteEnd(const EpochRun& run) const {
  const bool committed = run.state.phase == epoch::Phase::kCommitted;
  const std::string total =
      Seconds(std::chrono::duration<double>(s_.clock.Now() - run.started).count());
  std::string evicted;
  for (const std::string& engine : run.state.evicted) {
    evicted += (evicted.empty() ? "; without " : ", ") + engine;
  }
  Log(run,
      committed ? "committed after " + total + evicted
                : "aborted after " + total + ": " + run.state.why.ToString(),
      !committed || !evicted.empty());
}

void Driver::KeepStory(EpochRun& run) {
  std::map<ParticipantId, std::string> agents;
  for (const auto& [member, name] : run.names) {
    const Session* session = s_.membership.SessionOf(member);
    agents[member.id] = session == nullptr ? name : session->hello.name;
  }
  EpochLinks links = run.story.Links(agents);
  links.epoch = run.state.spec.epoch;
  links.version = run.state.spec.version;
  stories_.Keep(links.epoch, {std::move(run.story), run.ParticipantNames(), std::move(links)});
}

void Driver::RememberGivenUp(const PendingVersion& pending, const Status& why) {
  const Group* trainer = s_.membership.Trainer();
  if (pending.attempts > 0 || pending.published.empty() || stopping_) return;
  const auto number = numbers_.Take();
  if (!number) return;  // the log and the metric have it
  Nanos first = pending.published.begin()->second;
  for (const auto& [rank, at] : pending.published) first = std::min(first, at);
  const Nanos now = s_.clock.Now();
  EpochStatus status;
  status.epoch = *number;
  status.version = pending.version;
  status.phase = epoch::Phase::kAborted;
  status.attempt = 0;
  status.why = Status(Status(why).AtEpoch(*number));
  status.total_seconds = std::chrono::duration<double>(now - first).count();
  status.started_wall = s_.clock.WallSeconds() - status.total_seconds;
  status.trace_id = pending.trace_id;
  Story story(first);
  for (const auto& [rank, at] : pending.published) {
    const bool known = trainer != nullptr && rank < trainer->world_size();
    story.Happened(at, known ? trainer->RankName(rank) : "trainer/" + std::to_string(rank),
                   "published", {});
  }
  story.Happened(now, "coordinator", "gives up", why);
  stories_.Keep(*number, {std::move(story), {}, {}});
  Remember(status);
  s_.options.notes({*number, pending.version, pending.trace_id, "", true,
                    "given up before any epoch began: " + why.ToString()});
}

std::vector<EpochLinks> Driver::Links() const {
  constexpr size_t kEpochsMax = 8;
  std::vector<EpochLinks> out;
  for (const EpochStatus& status : history_) {
    const Stories::Kept* kept = stories_.Find(status.epoch);
    if (status.phase != epoch::Phase::kCommitted || kept == nullptr || kept->links.links.empty()) {
      continue;
    }
    out.push_back(kept->links);
    if (out.size() == kEpochsMax) break;
  }
  return out;
}

Result<EpochStory> Driver::Tell(Epoch asked) const {
  const Nanos now = s_.clock.Now();
  for (const EpochRun* run : Runs()) {
    if (asked == Epoch{} || run->state.spec.epoch == asked) return run->Tell(now);
  }
  for (const auto& draft : Drafts()) {
    if (asked != Epoch{} && draft->spec.epoch != asked) continue;
    return draft->story.Tell(StatusOf(*draft, now), {});
  }
  const auto ended = std::ranges::find_if(history_, [&](const EpochStatus& status) {
    return asked == Epoch{} || status.epoch == asked;
  });
  const Stories::Kept* kept = ended == history_.end() ? nullptr : stories_.Find(ended->epoch);
  if (kept != nullptr) return kept->story.Tell(*ended, kept->names);
  const std::string range = stories_.Range();
  return Fail(
      Status(Code::kNotFound, Reason::kNotRegistered,
             "no such epoch is remembered here; those that are: " +
                 (range.empty() ? "none yet" : range))
          .AtEpoch(asked)
          .Remedy("`wwctl epochs` lists epochs; a coordinator knows those since its start"));
}

}  // namespace weightwire::coordinator
