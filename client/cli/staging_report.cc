#include "client/cli/staging_report.h"

#include "server/base/checked.h"
#include "server/transfer/staging.h"

namespace weightwire::cli {

Result<StagingReport> StagingOf(const layout::ModelLayout& source,
                                const layout::ModelLayout& target, const plan::TransferPlan& plan,
                                const std::vector<plan::LayoutClass>& classes) {
  const transfer::Tuning tuning;
  StagingReport report;
  report.slots_bytes = transfer::SlotPoolSize(tuning).bytes();
  report.scratch_bytes = transfer::ScratchPoolSize(tuning).bytes();
  report.gpu_bytes = transfer::GpuPoolBytes(tuning);
  const uint64_t pools = report.slots_bytes + report.scratch_bytes;
  report.source.assign(source.ranks.size(), pools);
  const bool per_class = target.ranks.size() == classes.size();
  double sum = 0;
  double ranks = 0;
  for (size_t r = 0; r < target.ranks.size(); ++r) {
    WW_ASSIGN(const memory::ArenaMap arena, transfer::StageArenaOf(target.ranks[r]));
    const auto gathered = plan.gathered.find(static_cast<uint32_t>(r));
    const uint64_t gather =
        gathered == plan.gathered.end() ? 0 : transfer::GatherBytes(gathered->second);
    const auto bytes =
        CheckedAdd(transfer::StageBytes(arena, memory::kBuffersUsual), pools + gather);
    if (!bytes) {
      return Fail(Status(Code::kInvalidArgument, Reason::kShapeOverflow, "the stage is too large")
                      .AtRank("target/" + std::to_string(r)));
    }
    report.target.push_back(*bytes);
    const auto members = static_cast<double>(per_class ? classes[r].ranks.size() : 1);
    sum += members * static_cast<double>(*bytes);
    ranks += members;
  }
  report.target_mean = ranks > 0 ? sum / ranks : 0;
  return report;
}

}  // namespace weightwire::cli
