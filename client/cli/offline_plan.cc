#include "client/cli/offline_plan.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "client/cli/egress_report.h"
#include "client/cli/matrix_svg.h"
#include "client/cli/offline.h"
#include "client/cli/staging_report.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/base/clock.h"
#include "server/plan/classes.h"
#include "server/plan/explain.h"
#include "server/plan/plan.h"
#include "server/plan/plan_bytes.h"

namespace weightwire::cli {
namespace {

using Json = nlohmann::ordered_json;

int64_t PeakRssBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

/// A plan that was proved, and what it was proved against.
struct Proved {
  layout::ModelLayout source;
  layout::ModelLayout target;              ///< one rank per class, if so asked
  std::vector<plan::LayoutClass> classes;  ///< of the whole target
  plan::TransferPlan plan;
  double seconds = 0;
  std::vector<std::string> notes;
};

Result<plan::TransferPlan> PlanOf(const OfflinePlan& request, const layout::ModelLayout& source,
                                  const layout::ModelLayout& target) {
  if (request.verify_path.empty()) {
    WW_ASSIGN(plan::TransferPlan made, plan::BuildPlan(source, target));
    WW_FAIL_IF_ERROR(plan::VerifyPlan(made, source, target));
    return made;
  }
  WW_ASSIGN(const std::string bytes,
            ReadFile(request.verify_path, "--verify takes a file that --out has written"));
  WW_ASSIGN(plan::TransferPlan read, plan::FromBytes(bytes));
  Status proof = plan::VerifyPlan(read, source, target);
  if (proof.ok()) return read;
  return Fail(Status(Code::kFailedPrecondition, Reason::kInvalidRequest, proof.message())
                  .AtRank(proof.rank())
                  .AtTensor(proof.tensor())
                  .Remedy("the file is damaged, or was made for another --config, --from, --to or "
                          "--per: write it again with --out"));
}

Result<Proved> Prove(const OfflinePlan& request, const std::string& config) {
  Proved proved;
  const Nanos started = SystemClock().Now();
  WW_ASSIGN(proved.source, LayoutOf(config, request.from));
  WW_ASSIGN(proved.target, LayoutOf(config, request.to));
  proved.classes = plan::LayoutClasses(proved.target);
  if (request.per_class) {
    proved.target = plan::OnePerClass(std::move(proved.target), proved.classes);
  }
  WW_ASSIGN(proved.plan, PlanOf(request, proved.source, proved.target));
  proved.seconds = std::chrono::duration<double>(SystemClock().Now() - started).count();
  proved.notes = NotesOf(config);
  return proved;
}

/// Class size → number of classes.
std::map<size_t, size_t> ClassSizes(const std::vector<plan::LayoutClass>& classes) {
  std::map<size_t, size_t> sizes;
  for (const plan::LayoutClass& entry : classes) ++sizes[entry.ranks.size()];
  return sizes;
}

std::string ClassesText(const OfflinePlan& request, const std::vector<plan::LayoutClass>& classes) {
  std::string sizes;
  for (const auto& [size, count] : ClassSizes(classes)) {
    if (!sizes.empty()) sizes += ", ";
    sizes +=
        std::to_string(count) + " x " + std::to_string(size) + (size == 1 ? " rank" : " ranks");
  }
  return "layout classes of the target: " + sizes +
         (request.per_class ? "; planned for one rank of each\n" : "; planned for every rank\n");
}

std::string RatioText(double ratio) {
  char text[32];
  std::snprintf(text, sizeof text, "%.4f", ratio);
  return text;
}

uint64_t Most(const std::vector<uint64_t>& bytes) {
  return bytes.empty() ? 0 : *std::ranges::max_element(bytes);
}

std::string StagingText(const StagingReport& staging) {
  const auto text = [](auto bytes) { return BytesText(static_cast<int64_t>(bytes)); };
  return "memory beyond the application's, for an agent with one rank: source " +
         text(Most(staging.source)) + "; target at most " + text(Most(staging.target)) +
         ", on average " + text(staging.target_mean) + " (" + text(staging.slots_bytes) +
         " slots + " + text(staging.scratch_bytes) +
         " scratch, shared by the agent's ranks); with GPU-direct " + text(staging.gpu_bytes) +
         " more of each GPU's slab\n";
}

Json StagingJson(const StagingReport& staging, bool by_rank) {
  Json json = {{"slots_bytes", staging.slots_bytes},  {"scratch_bytes", staging.scratch_bytes},
               {"gpu_bytes", staging.gpu_bytes},      {"source_max", Most(staging.source)},
               {"source_mean", Most(staging.source)}, {"target_max", Most(staging.target)},
               {"target_mean", staging.target_mean}};
  if (by_rank) json["ranks"] = {{"source", staging.source}, {"target", staging.target}};
  return json;
}

std::string EgressText(const EgressReport& egress) {
  const auto text = [](uint64_t bytes) { return BytesText(static_cast<int64_t>(bytes)); };
  return "coordinator sends slices of " + text(egress.slices) + " once (" + text(egress.names) +
         " of names; " + text(egress.slice_max) + " the largest), Prepares of " +
         text(egress.first_prepares) + " with the first version and " + text(egress.next_prepares) +
         " with each later one; to agents of before " + text(egress.old_slices) + " and " +
         text(egress.old_prepares) + "\n";
}

Json EgressJson(const EgressReport& egress) {
  return {{"slices", egress.slices},
          {"slice_max", egress.slice_max},
          {"names", egress.names},
          {"old_slices", egress.old_slices},
          {"first_prepares", egress.first_prepares},
          {"next_prepares", egress.next_prepares},
          {"old_prepares", egress.old_prepares}};
}

std::string Text(const OfflinePlan& request, const Proved& proved, const plan::PlanReport& report,
                 const StagingReport& staging) {
  const auto bytes = [](double count) { return BytesText(static_cast<int64_t>(count)); };
  std::string text =
      (request.verify_path.empty() ? "planned and proved in " : "read and proved in ") +
      SecondsText(proved.seconds) + ", " + BytesText(PeakRssBytes()) + " of memory\n";
  text += ClassesText(request, proved.classes);
  text += "busiest source rank sends " + BytesText(report.egress_max) + " = " +
          RatioText(report.egress_over_bound) + " x the least possible, " +
          bytes(report.egress_bound) + "\n";
  text += "busiest target rank receives " + BytesText(report.ingress_max) + " = " +
          RatioText(report.ingress_over_bound) + " x the least possible, " +
          bytes(report.ingress_bound) + "\n";
  text += "simulated time " + RatioText(report.simulated_over_bound) +
          " x the greater of the two at link rate\n";
  text += StagingText(staging);
  if (request.egress) text += EgressText(EgressOf(proved.plan));
  if (request.explain) {
    for (size_t r = 0; r < staging.target.size(); ++r) {
      text += "target/" + std::to_string(r) + ": " +
              BytesText(static_cast<int64_t>(staging.target[r])) + " of agent's memory\n";
    }
  }
  if (request.explain || !request.tensor.empty()) {
    return text + plan::Explain(proved.plan, proved.source, proved.target, request.tensor);
  }
  return text + "plan " + proved.plan.id.ToHex() + ": " + BytesText(report.bytes_total) + " in " +
         std::to_string(report.copies) + " copies and " + std::to_string(report.streams) +
         " streams, from " + std::to_string(proved.plan.source_ranks) + " to " +
         std::to_string(proved.plan.target_ranks) + " ranks\n" + NotesText(proved.notes);
}

std::string AsJson(const OfflinePlan& request, const Proved& proved, const plan::PlanReport& report,
                   const StagingReport& staging) {
  Json classes = Json::object();
  for (const auto& [size, count] : ClassSizes(proved.classes)) {
    classes[std::to_string(size)] = count;
  }
  Json json = {
      {"plan_id", proved.plan.id.ToHex()},
      {"seconds", proved.seconds},
      {"peak_rss_bytes", PeakRssBytes()},
      {"bytes_total", report.bytes_total},
      {"copies", report.copies},
      {"proof", "exact"},
      {"egress_over_bound", report.egress_over_bound},
      {"ingress_over_bound", report.ingress_over_bound},
      {"simulated_over_bound", report.simulated_over_bound},
      {"from", request.from},
      {"to", request.to},
      {"per", request.per_class ? "class" : "rank"},
      {"streams", report.streams},
      {"egress_max", report.egress_max},
      {"egress_bound", report.egress_bound},
      {"ingress_max", report.ingress_max},
      {"ingress_bound", report.ingress_bound},
      {"classes", classes},
      {"staging", StagingJson(staging, request.explain)},
      {"notes", proved.notes},
  };
  if (request.egress) json["egress"] = EgressJson(EgressOf(proved.plan));
  if (request.explain) {
    Json members = Json::array();
    for (const plan::LayoutClass& entry : proved.classes) members.push_back(entry.ranks);
    json["ranks"] = {{"egress", report.egress}, {"ingress", report.ingress}, {"classes", members}};
  }
  return json.dump() + "\n";
}

}  // namespace

Result<std::string> RunOfflinePlan(const OfflinePlan& request) {
  WW_ASSIGN(const std::string config, ReadConfig(request.config_path));
  const Result<Proved> made = Prove(request, config);
  if (!made) {
    std::fputs(NotesText(NotesOf(config)).c_str(), stderr);  // they may be the reason
    return Fail(made.error());
  }
  const Proved& proved = *made;
  if (!request.out_path.empty()) {
    WW_FAIL_IF_ERROR(WriteFile(request.out_path, plan::ToBytes(proved.plan)));
  }
  if (!request.svg_path.empty()) {
    WW_FAIL_IF_ERROR(
        WriteFile(request.svg_path, MatrixSvg(proved.plan, request.from + " to " + request.to)));
  }
  const plan::PlanReport report = plan::Report(proved.plan, proved.source, proved.target);
  WW_ASSIGN(const StagingReport staging,
            StagingOf(proved.source, proved.target, proved.plan, proved.classes));
  return request.json ? AsJson(request, proved, report, staging)
                      : Text(request, proved, report, staging);
}

}  // namespace weightwire::cli
