#include "server/wire/reports.h"

#include <algorithm>
#include <variant>

#include "server/wire/checks.h"
#include "server/wire/limits.h"

namespace weightwire::wire {
void ReportsWriter::Add(v1::ReportRequest report, uint64_t number) {
  reports_.emplace_back(std::move(report), number);
}

void ReportsWriter::Next(v1::Reports* message) {
  message->Clear();
  size_t bytes = 0;
  while (!reports_.empty()) {
    auto& [report, number] = reports_.front();
    const size_t size = report.ByteSizeLong();
    if (size > kPartBytesMax) {
      if (bytes > 0) return;
      if (long_.empty()) report.SerializeToString(&long_);
      message->set_part(long_.substr(sent_, kPartBytesMax));
      sent_ += message->part().size();
      message->set_more(sent_ < long_.size());
      if (message->more()) return;
      message->set_number(number);
      long_ = {};
      sent_ = 0;
      return reports_.pop_front();
    }
    bytes += size;
    if (bytes > kPartBytesMax) return;
    *message->add_reports() = std::move(report);
    message->set_number(std::max(message->number(), number));
    reports_.pop_front();
  }
}

std::vector<Result<AgentReport>> ReportsReader::Add(const v1::Reports& message) {
  std::vector<Result<AgentReport>> out;
  const bool inside = !long_.empty() || lost_;
  if (!message.part().empty() && message.reports().empty()) {
    if (!lost_ && long_.size() + message.part().size() > kReportBytesMax) {
      out.push_back(
          Fail(TooLarge("report", long_.size() + message.part().size(), kReportBytesMax)));
      long_ = {};
      lost_ = true;
    }
    if (!lost_) long_ += message.part();
    if (message.more()) return out;
    if (!std::exchange(lost_, false)) {
      v1::ReportRequest report;
      if (report.ParseFromString(std::exchange(long_, {}))) {
        out.push_back(FromProto(report));
      } else {
        out.push_back(Fail(Bad("reports.part", "its parts are no report")));
      }
    }
    return out;
  }
  if (inside || !message.part().empty() || message.more()) {
    out.push_back(Fail(Bad("reports.part", "a report's parts are not one after another")));
    long_ = {};
    lost_ = false;
  }
  for (const v1::ReportRequest& report : message.reports()) out.push_back(FromProto(report));
  return out;
}

v1::ReportRequest ReportWithin(size_t bytes_max, AgentId agent, const epoch::Report& report) {
  v1::ReportRequest out = ToProto(agent, report);
  const size_t bytes = out.ByteSizeLong();
  if (bytes <= bytes_max) return out;
  const Status why = TooLarge("report", bytes, bytes_max);
  const auto instead = [&](const auto& r) -> epoch::Report {
    using Kind = std::decay_t<decltype(r)>;
    if constexpr (std::is_same_v<Kind, epoch::HashedReport>) {
      return epoch::HashedReport{r.epoch, r.member, r.verification, why, {}, 0};
    } else if constexpr (std::is_same_v<Kind, epoch::LostReport>) {
      return epoch::LostReport{r.member, r.why};
    } else {
      return epoch::FailedReport{r.epoch, r.member, why};
    }
  };
  return ToProto(agent, std::visit(instead, report));
}

}  // namespace weightwire::wire
