#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "server/wire/control.h"
#include "weightwire/v1/coordinator.pb.h"

/// Reports of one agent on its session: those that wait travel together, one that is too long for a
/// message travels in parts. Pure; thread-compatible.
namespace weightwire::wire {

/// The agent's end: a queue.
class ReportsWriter {
 public:
  /// `number`: what the coordinator answers when it has taken the report; 0: nothing. Rises.
  void Add(v1::ReportRequest report, uint64_t number);
  bool empty() const { return reports_.empty(); }
  /// The next message, of kPartBytesMax and some at most. Not when empty.
  void Next(v1::Reports* message);

 private:
  std::deque<std::pair<v1::ReportRequest, uint64_t>> reports_;
  std::string long_;  ///< the first report's bytes, while it is being sent in parts
  size_t sent_ = 0;   ///< of them
};

/// The coordinator's end. One for each session.
class ReportsReader {
 public:
  /// What is whole now, in order. Something that cannot be read is an error in its place, and only
  /// that is lost:
  ///   kInvalidArgument / kInvalidRequest …  as FromProto(v1::ReportRequest)
  ///   kInvalidArgument / kMessageTooLarge   over kReportBytesMax
  std::vector<Result<AgentReport>> Add(const v1::Reports& message);

 private:
  std::string long_;   ///< of the report that comes in parts
  bool lost_ = false;  ///< it is over the limit: the rest of it is ignored
};

/// `report`, or, when it has more than `bytes_max` serialised bytes, that it failed for this
/// reason: what cannot be sent must not be waited for until a deadline.
v1::ReportRequest ReportWithin(size_t bytes_max, AgentId agent, const epoch::Report& report);

}  // namespace weightwire::wire
