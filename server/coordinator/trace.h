#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/coordinator/coordinator.h"
#include "server/epoch/messages.h"

namespace weightwire::coordinator {

/// What happened in one epoch, for people: written while it runs, told at any time. A plain value,
/// bounded by kLinesMax; what comes after that is only counted.
///
/// Ranks tell times by the clocks of their agents. Where an agent's clock stands follows from what
/// must have been before what: a command is sent before it is obeyed, and what a report tells has
/// ended when the report comes. The middle of these bounds is taken; half their distance, which is
/// mostly the time of one call, is the most by which it can be wrong.
class Trace {
 public:
  static constexpr size_t kLinesMax = 16'384;

  explicit Trace(Nanos started = {}) : started_(started) {}

  /// Something that the coordinator did, from `begin` to `end`.
  void Step(std::string name, std::string about, Nanos begin, Nanos end);
  /// Once for each (who, what).
  void Happened(Nanos at, const std::string& who, const std::string& what, const Status& why);
  /// Members are told what they answer with a report that has a span of this name; the first time
  /// counts.
  void CommandSent(const std::string& span, Nanos at) { sent_.emplace(span, at); }
  void Reported(const std::string& rank, const std::string& agent,
                const std::vector<epoch::Span>& spans, Nanos heard);

  size_t lines() const { return lines_; }
  /// `names`: of the participants that ranks read from.
  EpochTrace Describe(EpochStatus status, const std::map<ParticipantId, std::string>& names) const;
  /// `agents`: of the participants that ranks read from; of the others nothing is told.
  EpochEdges Edges(const std::map<ParticipantId, std::string>& agents) const;

 private:
  struct Bounds {
    int64_t least_us = INT64_MIN;
    int64_t most_us = INT64_MAX;
  };
  struct RankSpans {
    std::string agent;
    std::vector<epoch::Span> spans;
  };
  bool Room();
  void Learn(Bounds& clock, const epoch::Span& span, Nanos heard) const;
  double Since(Nanos at) const;

  Nanos started_;
  std::vector<EpochTrace::Step> steps_;
  std::vector<EpochTrace::Event> events_;
  std::set<std::pair<std::string, std::string>> happened_;
  std::map<std::string, Nanos> sent_;
  std::map<std::string, RankSpans> tracks_;  ///< by rank
  std::map<std::string, Bounds> clocks_;  ///< by agent: what is added to its time to make it ours
  size_t lines_ = 0;
  uint64_t left_off_ = 0;
};

/// The traces of the newest epochs that ended: so many, and so many lines of all together.
class Traces {
 public:
  struct Kept {
    Trace trace;
    std::map<ParticipantId, std::string> names;
    EpochEdges edges;
  };
  void Keep(Epoch epoch, Kept kept);
  /// Null when it is not remembered (any more).
  const Kept* Find(Epoch epoch) const;
  /// "41 to 48"; empty when there is none.
  std::string Range() const;

 private:
  static constexpr size_t kTracesMax = 64;
  static constexpr size_t kLinesMax = 4 * Trace::kLinesMax;
  std::map<Epoch, Kept> kept_;
  size_t lines_ = 0;
};

}  // namespace weightwire::coordinator
