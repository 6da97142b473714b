#include <algorithm>
#include <utility>

#include "server/coordinator/epoch_runner.h"
#include "server/coordinator/waiting_words.h"

// What is told of epochs that run: to the trace that people ask for, and to the log. Nothing
// here decides anything.
namespace weightwire::coordinator {
namespace {

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
  std::pair<const char*, Status> operator()(const epoch::SourceDoneReport&) const {
    return {"sourced", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::StagedReport&) const {
    return {"staged", {}};
  }
  std::pair<const char*, Status> operator()(const epoch::SwappedReport&) const {
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
  std::pair<const char*, Status> operator()(const epoch::HashedReport&) const {
    return {"attested", {}};
  }
};

}  // namespace

void EpochRunner::Log(const EpochRun& run, std::string text, bool bad) const {
  const epoch::Spec& spec = run.state.spec;
  s_.options.notes({spec.epoch, spec.version, run.trace_id, "", bad, std::move(text)});
}

void EpochRunner::NoteBeginning(const EpochRun& run) const {
  Log(run,
      std::string(KindInWords(run.state.spec.kind)) + " begins, attempt " +
          std::to_string(run.attempt) + ", for " + EnginesText(run),
      false);
}

void EpochRunner::NotePhase(EpochRun& run, epoch::Phase left, double seconds) const {
  const epoch::Phase now = run.state.phase;
  if (now == epoch::Phase::kAborting) {
    run.trace.Happened(s_.clock.Now(), "coordinator", "aborts", run.state.why);
  }
  if (now == epoch::Phase::kCommitted || now == epoch::Phase::kAborted) return;
  Log(run,
      std::string(epoch::PhaseName(now)) + " after " + Seconds(seconds) + " of " +
          std::string(epoch::PhaseName(left)) +
          (run.state.why.ok() ? "" : ": " + run.state.why.ToString()),
      !run.state.why.ok());
}

void EpochRunner::NoteReport(EpochRun& run, const epoch::Report& report) {
  const epoch::Member member = std::visit([](const auto& r) { return r.member; }, report);
  const auto name = run.names.find(member);
  if (name == run.names.end()) return;
  const auto [what, why] = std::visit(WordOf{}, report);
  const Nanos now = s_.clock.Now();
  run.trace.Happened(now, name->second, what, why);
  const Session* session = s_.membership.SessionOf(member);
  std::visit(
      [&](const auto& r) {
        if constexpr (requires { r.spans; }) {
          if (session == nullptr) return;
          run.trace.Reported(name->second, session->hello.name, r.spans, now);
        }
      },
      report);
}

void EpochRunner::NoteEnd(const EpochRun& run) const {
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

void EpochRunner::KeepTrace(EpochRun& run) {
  std::map<ParticipantId, std::string> agents;
  for (const auto& [member, name] : run.names) {
    const Session* session = s_.membership.SessionOf(member);
    agents[member.id] = session == nullptr ? name : session->hello.name;
  }
  EpochEdges edges = run.trace.Edges(agents);
  edges.epoch = run.state.spec.epoch;
  edges.version = run.state.spec.version;
  shared_.history.Keep(edges.epoch,
                       {std::move(run.trace), run.ParticipantNames(), std::move(edges)});
}

}  // namespace weightwire::coordinator
