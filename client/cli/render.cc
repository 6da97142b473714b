#include "client/cli/render.h"

#include <algorithm>
#include <map>
#include <set>

#include "client/cli/epoch_engines.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/coordinator/waiting_words.h"
#include "server/wire/json.h"
#include "server/wire/status.h"

namespace weightwire::cli {
namespace {

std::string NumberOrDash(uint64_t number) { return number == 0 ? "-" : std::to_string(number); }

/// "101", and which lineage's where there are several.
std::string VersionText(const v1::StatusResponse& status, uint64_t lineage, uint64_t version) {
  std::string text = std::to_string(version);
  if (status.lineage() <= 1) return text;
  return text + " (lineage " + (lineage == 0 ? "?" : std::to_string(lineage)) + ")";
}

std::string PathsText(const v1::StatusResponse::Epoch& epoch) {
  std::string text;
  for (const auto& [name, bytes] : std::map<std::string, int64_t>(
           epoch.bytes_by_transport().begin(), epoch.bytes_by_transport().end())) {
    if (!text.empty()) text += ", ";
    text.append(name).append(" ").append(BytesText(bytes));
  }
  if (epoch.bytes_kept() > 0) {
    if (!text.empty()) text += ", ";
    text.append("kept ").append(BytesText(epoch.bytes_kept()));
  }
  if (const std::string delta = DeltaText(epoch); !delta.empty()) {
    text.append(text.empty() ? "" : "; ").append(delta);
  }
  return text.empty() ? "-" : text;
}

std::string HeldText(const v1::StatusResponse::Engine& engine) {
  std::string text = NumberOrDash(engine.held_version());
  for (const auto& held : engine.held_beyond()) text += ", " + std::to_string(held.version());
  return text;
}

std::string OutcomeText(const v1::StatusResponse::Epoch& epoch) {
  if (epoch.why().code() != 0) return epoch.why().message();
  const std::string progress = ProgressText(epoch);
  return epoch.waiting_for().empty() ? progress
                                     : (progress.empty() ? "" : progress + "; ") + "waiting for " +
                                           coordinator::WaitingInWords(FirstOf(
                                               epoch.waiting_for(), 3, epoch.waiting_for_left()));
}

std::string KindOf(const v1::StatusResponse::Epoch& epoch) {
  return Word(v1::EpochKind_Name(epoch.kind()), "EPOCH_KIND_");
}

std::string PhaseOf(const v1::StatusResponse::Epoch& epoch) {
  return Word(v1::EpochPhase_Name(epoch.phase()), "EPOCH_PHASE_");
}

bool NeedsSomebody(const v1::StatusResponse::Engine& engine) {
  return !engine.ready() || engine.drained() || !engine.last_error().empty();
}

template <typename Messages>
std::string JsonArray(const Messages& messages) {
  std::string text;
  for (const auto& message : messages)
    text.append(text.empty() ? "[" : ",").append(wire::JsonText(message));
  return text.append(text.empty() ? "[]\n" : "]\n");
}

}  // namespace

bool Ended(const v1::StatusResponse::Epoch& epoch) {
  return epoch.phase() == v1::EPOCH_PHASE_COMMITTED || epoch.phase() == v1::EPOCH_PHASE_ABORTED;
}

std::string ProgressText(const v1::StatusResponse::Epoch& epoch) {
  if (epoch.phase() != v1::EPOCH_PHASE_TRANSFERRING || epoch.bytes_total() == 0) return "";
  const auto done = static_cast<double>(epoch.bytes_done());
  const auto total = static_cast<double>(epoch.bytes_total());
  // Rounded down: 100 % is said when nothing is left.
  std::string text = std::to_string(epoch.bytes_done() * 100 / epoch.bytes_total()) + " % of " +
                     BytesText(epoch.bytes_total());
  if (done == 0 || epoch.transfer_seconds() <= 0) return text;
  const double rate = done / epoch.transfer_seconds();
  text += " at " + BytesText(static_cast<int64_t>(rate)) + "/s";
  return done < total ? text + ", about " + SecondsText((total - done) / rate) + " left" : text;
}

std::string DeltaText(const v1::StatusResponse::Epoch& epoch) {
  if (epoch.delta_bytes() == 0) return "";
  std::string text =
      "changes " + BytesText(epoch.delta_code_bytes()) + " for " + BytesText(epoch.delta_bytes());
  if (epoch.delta_elements() > 0) {
    text += ", " +
            PercentText(static_cast<double>(epoch.delta_changed()) /
                        static_cast<double>(epoch.delta_elements())) +
            " of its elements";
  }
  return text;
}

std::string ParticipantsText(const v1::StatusResponse& status, const View& view) {
  Table table({"RANK", "ROLE", "AGENT", "PID", "LAYOUT", "TENSORS", "BYTES"});
  for (const auto& p : status.participants()) {
    table.Add({p.group() + "/" + std::to_string(p.rank()) + " of " + std::to_string(p.world_size()),
               Word(v1::GroupRole_Name(p.role()), "GROUP_ROLE_"), p.agent_name(),
               std::to_string(p.pid()),
               p.has_layout() ? (p.spec().empty() ? "explicit" : p.spec()) : "none yet",
               std::to_string(p.tensors()), BytesText(p.bytes())});
  }
  return table.Text(view.wide ? 0 : view.columns);
}

std::string EnginesText(const v1::StatusResponse& status, const View& view) {
  std::vector<const v1::StatusResponse::Engine*> engines;
  for (const auto& engine : status.engines()) engines.push_back(&engine);
  const bool all = view.rows == 0 || engines.size() <= view.rows;
  if (!all) std::ranges::stable_partition(engines, [](const auto* e) { return NeedsSomebody(*e); });
  const size_t shown = all ? engines.size() : view.rows;
  std::vector<std::string> header = {"ENGINE", "STATE", "VERSION"};
  if (view.wide) header.emplace_back("EPOCH");
  header.insert(header.end(), {"LAG", "READY"});
  if (view.wide) header.emplace_back("ROLLBACK TO");
  header.insert(header.end(), {"RANKS", "LAST ERROR"});
  Table table(std::move(header));
  for (size_t i = 0; i < shown; ++i) {
    const auto& e = *engines[i];
    std::vector<std::string> row = {
        e.name(),
        std::string(
            coordinator::StateInWords(Word(v1::EngineState_Name(e.state()), "ENGINE_STATE_"))) +
            (e.drained() ? e.busy_with().empty() ? ", drained" : ", draining" : ""),
        e.version() == 0 ? "-" : VersionText(status, e.lineage(), e.version())};
    if (view.wide) row.push_back(NumberOrDash(e.serving_epoch()));
    row.insert(row.end(), {std::to_string(e.lag_versions()), e.ready() ? "yes" : "no"});
    if (view.wide) row.push_back(HeldText(e));
    row.insert(row.end(), {std::to_string(e.ranks_present()) + "/" + std::to_string(e.world_size()),
                           e.last_error().empty() ? "-" : e.last_error()});
    table.Add(std::move(row));
  }
  const size_t columns = view.wide ? 0 : view.columns;
  const std::string text = view.errors_cut ? table.Text(columns) : table.TextWithReasons(columns);
  if (all) return text;
  const auto ready = std::count_if(engines.begin() + static_cast<std::ptrdiff_t>(shown),
                                   engines.end(), [](const auto* e) { return e->ready(); });
  return text + "and " + std::to_string(engines.size() - shown) + " more, " +
         std::to_string(ready) + " of them ready\n";
}

std::string EpochsText(const v1::StatusResponse& status, const View& view) {
  const EpochEngines names(status);
  const int shown = view.rows == 0 ? status.epochs_size()
                                   : std::min(status.epochs_size(), static_cast<int>(view.rows));
  if (view.wide) {
    Table table({"EPOCH", "KIND", "VERSION", "PHASE", "ATTEMPT", "BYTES", "TRANSPORT", "TRANSFER",
                 "TOTAL", "ENGINES", "ROOT", "WHY"});
    for (const auto& e : status.epochs()) {
      if (table.rows() == static_cast<size_t>(shown)) break;
      const std::string left_out = Joined(names.LeftOut(e));
      const std::string engines =
          Joined(names.Of(e)) + (left_out.empty() ? "" : " without " + left_out);
      table.Add({NumberOrDash(e.epoch()), KindOf(e), VersionText(status, e.lineage(), e.version()),
                 PhaseOf(e), std::to_string(e.attempt()), BytesText(e.bytes()), PathsText(e),
                 SecondsText(e.transfer_seconds()), SecondsText(e.total_seconds()), engines,
                 e.content_root().empty() ? "-" : e.content_root().substr(0, 12), OutcomeText(e)});
    }
    return table.Text();
  }
  Table table({"EPOCH", "KIND", "VERSION", "PHASE", "ATTEMPT", "BYTES", "TOTAL", "ENGINES", "WHY"});
  for (const auto& e : status.epochs()) {
    if (table.rows() == static_cast<size_t>(shown)) break;
    const auto left_out = names.LeftOut(e);
    table.Add({NumberOrDash(e.epoch()), KindOf(e), VersionText(status, e.lineage(), e.version()),
               PhaseOf(e), std::to_string(e.attempt()), BytesText(e.bytes()),
               SecondsText(e.total_seconds()),
               FirstOf(names.Of(e)) + (left_out.empty() ? "" : " without " + FirstOf(left_out)),
               OutcomeText(e)});
  }
  return table.TextWithReasons(view.columns);
}

std::string EpochsPageText(const v1::StatusResponse& status, const View& view) {
  const std::string text = EpochsText(status, view);
  if (status.epochs_left() == 0) return text;
  return text + "and " + std::to_string(status.epochs_left()) + " older; --epochs 0 shows all\n";
}

std::string VerifyText(const v1::VerifyResponse& result) {
  Table table({"ENGINE", "VERSION", "EPOCH", "ROOT", "CLASS", "TENSORS", "PARTIAL", "BYTES",
               "SECONDS", "RESULT"});
  std::set<std::string> differ;
  for (const auto& difference : result.differences()) differ.insert(difference.engine());
  // Of more differences than there is room for, the others' engines are not known.
  const char* rest = result.differences_total() == 0 ? "equal" : "read";
  size_t equal = 0;
  for (const auto& e : result.engines()) {
    const bool read = e.why().code() == 0;
    equal += read && result.differences_total() == 0 ? 1 : 0;
    table.Add({e.name(), std::to_string(e.version()), std::to_string(e.epoch()),
               read ? e.root() : "-", read ? e.content_class().substr(0, 8) : "-",
               std::to_string(e.tensors()), std::to_string(e.tensors_partial()),
               BytesText(e.bytes()), SecondsText(e.seconds()),
               read             ? differ.contains(e.name()) ? "differs" : rest
               : e.superseded() ? "superseded: " + e.why().message()
                                : e.why().message()});
  }
  std::string text = table.Text();
  for (const auto& difference : result.differences()) {
    text += difference.engine() + ": " + difference.tensor() + ": " + difference.text() + "\n";
  }
  if (result.differences_total() > static_cast<uint64_t>(result.differences_size())) {
    text += "… and " +
            std::to_string(result.differences_total() -
                           static_cast<uint64_t>(result.differences_size())) +
            " more\n";
  }
  if (equal > 0) text += CountText(equal, "engine") + " equal\n";
  return text;
}

std::string VerifyJson(const v1::VerifyResponse& result) { return wire::JsonText(result) + "\n"; }

Status VerifyOutcome(const v1::VerifyResponse& result) {
  if (result.differences_total() > 0) {
    const auto& first = result.differences(0);
    return Status(Code::kAborted, Reason::kDigestMismatch,
                  std::to_string(result.differences_total()) +
                      " differences between what should be equal")
        .AtRank(first.engine())
        .AtTensor(first.tensor())
        .Remedy("`wwctl evict` what differs: it rejoins and is brought up to date by a peer");
  }
  for (const auto& engine : result.engines()) {
    if (engine.why().code() == 0) continue;
    auto why = wire::FromProto("why", engine.why());
    if (!why) return why.error();
    return std::move(*why);
  }
  return OkStatus();
}

std::string CountText(uint64_t count, const std::string& noun) {
  return std::to_string(count) + " " + noun + (count == 1 ? "" : "s");
}

std::string WaitingText(const v1::StatusResponse& status) {
  if (!status.waiting_for().empty()) {
    return "waiting for: " + coordinator::WaitingInWords(status.waiting_for());
  }
  if (status.engines().empty()) return "idle: no engine is registered";
  if (status.committed_version() == 0) return "idle: nothing was published yet";
  const std::string version =
      VersionText(status, status.committed_lineage(), status.committed_version());
  std::vector<std::string> others;  // why they differ stands in their rows
  for (const auto& engine : status.engines()) {
    const bool serves = engine.ready() && engine.version() == status.committed_version() &&
                        (engine.lineage() == 0 || status.committed_lineage() == 0 ||
                         engine.lineage() == status.committed_lineage());
    if (!serves && !engine.drained()) others.push_back(engine.name());
  }
  const auto engines = static_cast<uint64_t>(status.engines_size());
  if (others.empty()) {
    return engines == 1 ? "idle: the engine serves version " + version
                        : "idle: all engines serve version " + version;
  }
  constexpr size_t kNamed = 3;
  std::string text = "idle, but " + CountText(others.size(), "engine") + " of " +
                     std::to_string(engines) + " " + (others.size() == 1 ? "does" : "do") +
                     " not serve version " + version + ": ";
  for (size_t i = 0; i < std::min(kNamed, others.size()); ++i) {
    text += (i == 0 ? "" : ", ") + others[i];
  }
  if (others.size() > kNamed) text += " and " + std::to_string(others.size() - kNamed) + " more";
  return text;
}

std::string StatusText(const v1::StatusResponse& status, const View& view) {
  std::string text = WaitingText(status) + "\njob " + status.job() + ": ";
  text += status.committed_version() == 0
              ? "nothing committed yet"
              : "version " +
                    VersionText(status, status.committed_lineage(), status.committed_version()) +
                    " committed in epoch " + std::to_string(status.committed_epoch()) + " at " +
                    ClockText(status.committed_unix_seconds());
  text += "; " + CountText(status.agents(), "agent") + ", " +
          CountText(static_cast<uint64_t>(ParticipantsOf(status)), "rank") + "\n";
  if (status.engines_forgotten() > 0) {
    text += CountText(status.engines_forgotten(), "engine") +
            (status.engines_forgotten() == 1 ? " has left and is" : " have left and are") +
            " not shown\n";
  }
  if (!status.deciding()) {
    text += "NOT DECIDING: the journal failed; restart the coordinator once its disk works\n";
  }
  if (!status.journal().empty()) text += "JOURNAL: it " + status.journal() + '\n';
  constexpr size_t kEnginesShown = 20;
  View engines = view;
  engines.rows = view.wide ? 0 : kEnginesShown;
  return text + '\n' + EnginesText(status, engines) + '\n' + EpochsText(status, view);
}

std::string RollbackText(const v1::RollbackResponse& result) {
  const std::string version =
      "version " + std::to_string(result.version()) +
      (result.lineage() > 1 ? " of lineage " + std::to_string(result.lineage()) : "");
  const std::string epoch = std::to_string(result.epoch());
  if (result.held_epoch() == 0) return version + " is committed in epoch " + epoch + " already\n";
  return "rolled back to " + version + " (epoch " + epoch + ", content of epoch " +
         std::to_string(result.held_epoch()) + "); served by " + Joined(result.engines()) +
         (result.filling().empty() ? "" : "; filling " + Joined(result.filling())) + "\n";
}

std::string RollbackJson(const v1::RollbackResponse& result) {
  return wire::JsonText(result) + "\n";
}
std::string StatusJson(v1::StatusResponse status) {
  NameEngines(&status);
  return wire::JsonText(status) + "\n";
}
std::string ParticipantsJson(v1::StatusResponse status) { return JsonArray(status.participants()); }
std::string EnginesJson(v1::StatusResponse status) { return JsonArray(status.engines()); }
std::string EpochsJson(v1::StatusResponse status) {
  NameEngines(&status);
  return JsonArray(status.epochs());
}

}  // namespace weightwire::cli
