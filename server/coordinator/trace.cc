#include "server/coordinator/trace.h"

#include <algorithm>

namespace weightwire::coordinator {
namespace {

int64_t Micros(Nanos time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}

std::string AboutOf(const epoch::Span& span, const std::map<ParticipantId, std::string>& names) {
  if (span.source == ParticipantId{}) return "";
  const auto name = names.find(span.source);
  const std::string from =
      name == names.end() ? "participant " + std::to_string(span.source.value) : name->second;
  return "from " + from + (span.transport.empty() ? "" : " over " + span.transport);
}

}  // namespace

/// In whole microseconds, so that what follows at once does so in every unit.
double Trace::Since(Nanos at) const {
  return static_cast<double>(Micros(at) - Micros(started_)) / 1e6;
}

bool Trace::Room() {
  if (lines_ < kLinesMax) return ++lines_, true;
  ++left_off_;
  return false;
}

void Trace::Step(std::string name, std::string about, Nanos begin, Nanos end) {
  if (!Room()) return;
  steps_.push_back({std::move(name), std::move(about), Since(begin),
                    static_cast<double>(Micros(end) - Micros(begin)) / 1e6});
}

void Trace::Happened(Nanos at, const std::string& who, const std::string& what, const Status& why) {
  if (happened_.contains({who, what}) || !Room()) return;
  happened_.emplace(who, what);
  events_.push_back({Since(at), who, what, why});
}

void Trace::Reported(const std::string& rank, const std::string& agent,
                     const std::vector<epoch::Span>& spans, Nanos heard) {
  if (spans.empty()) return;
  RankSpans& track = tracks_[rank];
  track.agent = agent;
  for (const epoch::Span& span : spans) {
    // A report that is repeated tells nothing new.
    if (std::ranges::find(track.spans, span) != track.spans.end() || !Room()) continue;
    track.spans.push_back(span);
    Learn(clocks_[agent], span, heard);
  }
}

void Trace::Learn(Bounds& clock, const epoch::Span& span, Nanos heard) const {
  clock.most_us = std::min(clock.most_us, Micros(heard) + 1 - (span.begin_us + span.duration_us));
  const auto told = sent_.find(span.name);
  if (told == sent_.end()) return;
  clock.least_us = std::max(clock.least_us, Micros(told->second) - span.begin_us);
}

EpochTrace Trace::Describe(EpochStatus status,
                           const std::map<ParticipantId, std::string>& names) const {
  EpochTrace out;
  out.status = std::move(status);
  out.steps = steps_;
  out.events = events_;
  out.left_off = left_off_;
  for (const auto& [rank, track] : tracks_) {
    const Bounds& clock = clocks_.at(track.agent);
    // A span may be older than what is known to have been told: after a lost coordinator.
    const bool both = clock.least_us != INT64_MIN && clock.least_us <= clock.most_us;
    const int64_t width = both ? clock.most_us - clock.least_us : 0;
    const int64_t offset_us = clock.most_us - width / 2;
    EpochTrace::RankSpans& to = out.tracks.emplace_back();
    to.rank = rank;
    to.agent = track.agent;
    to.error_seconds = static_cast<double>(width) / 2e6;
    for (const epoch::Span& span : track.spans) {
      to.stretches.push_back(
          {span.name, AboutOf(span, names),
           static_cast<double>(span.begin_us + offset_us - Micros(started_)) / 1e6,
           static_cast<double>(span.duration_us) / 1e6, span.bytes});
    }
  }
  return out;
}

EpochEdges Trace::Edges(const std::map<ParticipantId, std::string>& agents) const {
  EdgeStats sums;
  for (const auto& [rank, track] : tracks_) {
    for (const epoch::Span& span : track.spans) {
      const auto source = agents.find(span.source);
      if (span.name != "read" || span.bytes == 0 || source == agents.end()) continue;
      sums.Add(source->second, track.agent, span.transport, span.begin_us, span.duration_us,
               span.bytes);
    }
  }
  return sums.Take();
}

void Traces::Keep(Epoch epoch, Kept kept) {
  lines_ += kept.trace.lines();
  kept_.insert_or_assign(epoch, std::move(kept));
  while (kept_.size() > kTracesMax || (lines_ > kLinesMax && kept_.size() > 1)) {
    lines_ -= kept_.begin()->second.trace.lines();
    kept_.erase(kept_.begin());
  }
}

const Traces::Kept* Traces::Find(Epoch epoch) const {
  const auto found = kept_.find(epoch);
  return found == kept_.end() ? nullptr : &found->second;
}

std::string Traces::Range() const {
  if (kept_.empty()) return "";
  return std::to_string(kept_.begin()->first.value) + " to " +
         std::to_string(kept_.rbegin()->first.value);
}

}  // namespace weightwire::coordinator
