#include "client/cli/offline_plan.h"

#include <sys/resource.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/table.h"
#include "server/base/clock.h"
#include "server/layout/scheme.h"
#include "server/plan/plan.h"

namespace weightwire::cli {
namespace {

Result<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  if (!file || !(text << file.rdbuf())) {
    return Fail(Status(Code::kInvalidArgument, Reason::kIoError, "cannot read '" + path + "'")
                    .Remedy("--config takes the path of a model's config.json"));
  }
  return text.str();
}

Result<layout::ModelLayout> LayoutOf(const std::string& config, const std::string& spec_text) {
  WW_ASSIGN(const layout::ParallelSpec spec, layout::ParseParallelSpec(spec_text));
  return layout::LayoutFromScheme(config, spec);
}

int64_t PeakRssBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace

Result<std::string> RunOfflinePlan(const OfflinePlan& request) {
  WW_ASSIGN(const std::string config, ReadFile(request.config_path));
  const Nanos started = SystemClock().Now();
  WW_ASSIGN(const layout::ModelLayout source, LayoutOf(config, request.from));
  WW_ASSIGN(const layout::ModelLayout target, LayoutOf(config, request.to));
  WW_ASSIGN(const plan::TransferPlan plan, plan::BuildPlan(source, target));
  WW_FAIL_IF_ERROR(plan::VerifyPlan(plan, source, target));
  const double seconds = std::chrono::duration<double>(SystemClock().Now() - started).count();
  if (!request.json) {
    return "planned and proved in " + SecondsText(seconds) + ", " + BytesText(PeakRssBytes()) +
           " of memory\n" + plan::Explain(plan, source, target, request.tensor);
  }
  const plan::PlanReport report = plan::Report(plan, source, target);
  const nlohmann::ordered_json json = {
      {"plan_id", plan.id.ToHex()},
      {"from", request.from},
      {"to", request.to},
      {"seconds", seconds},
      {"peak_rss_bytes", PeakRssBytes()},
      {"bytes_total", report.bytes_total},
      {"copies", report.copies},
      {"streams", report.streams},
      {"proof", "exact"},
      {"egress_over_bound", report.egress_over_bound},
      {"ingress_over_bound", report.ingress_over_bound},
      {"simulated_over_bound", report.simulated_over_bound},
      {"egress", report.egress},
      {"ingress", report.ingress},
  };
  return json.dump() + "\n";
}

}  // namespace weightwire::cli
