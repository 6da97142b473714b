#include "client/cli/epoch_trace.h"

#include <algorithm>
#include <map>
#include <vector>

#include "client/cli/render.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/coordinator/waiting_words.h"

namespace weightwire::cli {
namespace {

using Trace = v1::DescribeEpochResponse;

constexpr size_t kLastShown = 3;
constexpr int kTroublesShown = 20;

/// What members report in a phase; it is over when all have.
const std::map<std::string, std::vector<std::string>> kReportsOf = {
    {"publish", {"published"}},
    {"preparing", {"prepared"}},
    {"transferring", {"staged", "sourced"}},
    {"committing", {"swapped"}},
    {"aborting", {"drained"}}};

std::string PhaseOf(const Trace::Step& step) {
  return step.name() == "phase" ? step.about() : step.name();
}

/// "engine-a/1 staged at 410.0 ms, engine-a/0 staged at 391.2 ms": whom everyone waited for.
std::string LastOf(const Trace& trace, const std::string& phase) {
  const auto words = kReportsOf.find(phase);
  if (words == kReportsOf.end()) return "";
  std::vector<const Trace::Event*> reports;
  for (const auto& event : trace.events()) {
    if (std::ranges::find(words->second, event.what()) != words->second.end()) {
      reports.push_back(&event);
    }
  }
  std::ranges::stable_sort(reports, std::greater<>(), [](const auto* e) { return e->at(); });
  std::vector<std::string> shown;
  for (size_t i = 0; i < std::min(kLastShown, reports.size()); ++i) {
    shown.push_back(reports[i]->who() + " " +
                    std::string(coordinator::ReportInWords(reports[i]->what())) + " at " +
                    SecondsText(reports[i]->at()));
  }
  return Joined(shown) +
         (reports.size() > kLastShown ? " of " + std::to_string(reports.size()) : "");
}

std::string HeadText(const v1::StatusResponse::Epoch& epoch) {
  std::string text = "epoch " + std::to_string(epoch.epoch()) + ": " +
                     Word(v1::EpochKind_Name(epoch.kind()), "EPOCH_KIND_") + " of version " +
                     std::to_string(epoch.version()) + ", attempt " +
                     std::to_string(epoch.attempt()) + ", " +
                     Word(v1::EpochPhase_Name(epoch.phase()), "EPOCH_PHASE_") + "; began at " +
                     ClockText(epoch.started_unix_seconds()) + ", took " +
                     SecondsText(epoch.total_seconds()) + "\ntrace " + epoch.trace_id() +
                     "\nengines: " + (epoch.engines().empty() ? "none" : Joined(epoch.engines()));
  if (!epoch.left_out().empty()) text += "; left out: " + Joined(epoch.left_out());
  text +=
      "\nbytes: " + BytesText(epoch.bytes()) + ", of which kept " + BytesText(epoch.bytes_kept());
  if (const std::string delta = DeltaText(epoch); !delta.empty()) text += "; " + delta;
  text += "\n";
  if (epoch.why().code() != 0) text += "why: " + epoch.why().message() + "\n";
  if (!epoch.waiting_for().empty()) {
    text += "waiting for: " + coordinator::WaitingInWords(Joined(epoch.waiting_for())) + "\n";
  }
  return text;
}

std::string TroublesText(const Trace& trace) {
  std::string text;
  int troubles = 0;
  for (const auto& event : trace.events()) {
    if (event.why().code() == 0 || ++troubles > kTroublesShown) continue;
    text += "  " + SecondsText(event.at()) + "  " + event.who() + " " + event.what() + ": " +
            event.why().message() + "\n";
  }
  if (troubles > kTroublesShown) {
    text += "  and " + std::to_string(troubles - kTroublesShown) + " more\n";
  }
  return text.empty() ? "" : "\ntrouble:\n" + text;
}

std::string OtherAttemptsText(const v1::StatusResponse::Epoch& epoch,
                              const v1::StatusResponse& status) {
  std::string text;
  for (const auto& other : status.epochs()) {
    if (other.version() != epoch.version() || other.epoch() == epoch.epoch()) continue;
    text += "  epoch " + std::to_string(other.epoch()) + ": " +
            Word(v1::EpochKind_Name(other.kind()), "EPOCH_KIND_") + ", " +
            Word(v1::EpochPhase_Name(other.phase()), "EPOCH_PHASE_") +
            (other.why().code() == 0 ? "" : ": " + other.why().message()) + "\n";
  }
  return text.empty() ? "" : "\nother epochs of this version:\n" + text;
}

}  // namespace

std::string EpochTraceText(const Trace& trace, const v1::StatusResponse& status) {
  Table table({"PHASE", "BEGAN", "TOOK", "LAST"});
  for (const auto& step : trace.steps()) {
    const std::string phase = PhaseOf(step);
    const bool within = phase == "plan" || phase == "journal";
    table.Add({(within ? "  " : "") + phase, SecondsText(step.begin()), SecondsText(step.seconds()),
               LastOf(trace, phase)});
  }
  std::string text = HeadText(trace.epoch()) + "\n" + table.Text() + TroublesText(trace) +
                     OtherAttemptsText(trace.epoch(), status);
  if (trace.left_off() > 0) {
    text.append("\n").append(std::to_string(trace.left_off()));
    text += " events and spans were over the limit\n";
  }
  return text;
}

}  // namespace weightwire::cli
