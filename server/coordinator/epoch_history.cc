#include "server/coordinator/epoch_history.h"

#include <algorithm>
#include <string>

namespace weightwire::coordinator {

void EpochHistory::Remember(const EpochStatus& status) {
  epochs_.push_front(status);
  Names& engines = epochs_.front().engines;
  const auto like = std::find_if(epochs_.begin() + 1, epochs_.end(), [&](const EpochStatus& other) {
    return other.engines.size() == engines.size();
  });
  if (like != epochs_.end() && like->engines == engines) engines = like->engines;
  if (epochs_.size() > remembered_) epochs_.pop_back();
}

Result<EpochTrace> EpochHistory::Describe(Epoch asked) const {
  const auto ended = std::ranges::find_if(epochs_, [&](const EpochStatus& status) {
    return asked == Epoch{} || status.epoch == asked;
  });
  const Traces::Kept* kept = ended == epochs_.end() ? nullptr : traces_.Find(ended->epoch);
  if (kept != nullptr) return kept->trace.Describe(*ended, kept->names);
  const std::string range = traces_.Range();
  return Fail(
      Status(Code::kNotFound, Reason::kNotRegistered,
             "no such epoch is remembered here; those that are: " +
                 (range.empty() ? "none yet" : range))
          .AtEpoch(asked)
          .Remedy("`wwctl epochs` lists epochs; a coordinator knows those since its start"));
}

std::vector<EpochEdges> EpochHistory::Edges() const {
  constexpr size_t kEpochsMax = 8;
  std::vector<EpochEdges> out;
  for (const EpochStatus& status : epochs_) {
    const Traces::Kept* kept = traces_.Find(status.epoch);
    if (status.phase != epoch::Phase::kCommitted || kept == nullptr || kept->edges.edges.empty()) {
      continue;
    }
    out.push_back(kept->edges);
    if (out.size() == kEpochsMax) break;
  }
  return out;
}

}  // namespace weightwire::coordinator
