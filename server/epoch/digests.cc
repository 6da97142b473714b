#include "server/epoch/digests.h"

#include <map>
#include <set>
#include <utility>

namespace weightwire::epoch {
namespace {

/// One side's digests: plan → stream → digest.
using Streams = std::map<PlanId, std::map<uint32_t, uint64_t>>;

Status Mismatch(const State& state, const std::string& rank, const PlanId& plan, uint32_t stream,
                const std::string& what) {
  return Status(Code::kDataLoss, Reason::kDigestMismatch,
                "stream " + std::to_string(stream) + " of plan " + plan.ToHex() + ": " + what)
      .AtRank(rank)
      .AtEpoch(state.spec.epoch);
}

/// Adds `digests` to `streams`; the failure is a stream that is there already.
Status Collect(const State& state, const std::string& rank, const std::vector<Digest>& digests,
               Streams& streams) {
  for (const Digest& digest : digests) {
    if (!streams[digest.plan].emplace(digest.stream, digest.digest).second) {
      return Mismatch(state, rank, digest.plan, digest.stream, "reported twice");
    }
  }
  return OkStatus();
}

Status CompareEngine(const State& state, const EngineMembers& engine, const Streams& sent) {
  Streams written;
  for (size_t rank = 0; rank < engine.ranks.size(); ++rank) {
    const std::string name = engine.name + "/" + std::to_string(rank);
    const std::vector<Digest>& digests = state.staged.at(engine.ranks[rank]);
    WW_RETURN_IF_ERROR(Collect(state, name, digests, written));
    for (const Digest& digest : digests) {
      const auto plan = sent.find(digest.plan);
      if (plan == sent.end() || !plan->second.contains(digest.stream)) {
        return Mismatch(state, name, digest.plan, digest.stream, "no source sent it");
      }
      if (plan->second.at(digest.stream) != digest.digest) {
        return Mismatch(state, name, digest.plan, digest.stream,
                        "the bytes written differ from the bytes sent");
      }
    }
  }
  for (const auto& [plan, streams] : written) {
    for (const auto& [stream, digest] : sent.at(plan)) {
      if (!streams.contains(stream)) {
        return Mismatch(state, engine.name, plan, stream, "sent but not written");
      }
    }
  }
  if (written.empty() && !sent.empty()) {
    const auto& [plan, streams] = *sent.begin();
    return Mismatch(state, engine.name, plan, streams.begin()->first, "the engine wrote nothing");
  }
  return OkStatus();
}

}  // namespace

Status CompareDigests(const State& state) {
  Streams sent;
  for (size_t rank = 0; rank < state.spec.sources.size(); ++rank) {
    WW_RETURN_IF_ERROR(Collect(state, state.spec.source_group + "/" + std::to_string(rank),
                               state.sourced.at(state.spec.sources[rank]), sent));
  }
  std::set<PlanId> read;
  for (const EngineMembers& engine : state.spec.engines) {
    WW_RETURN_IF_ERROR(CompareEngine(state, engine, sent));
    for (const Member& member : engine.ranks) {
      for (const Digest& digest : state.staged.at(member)) read.insert(digest.plan);
    }
  }
  if (!state.excluded.empty()) return OkStatus();  // perhaps its plan was only for who was lost
  for (const auto& [plan, streams] : sent) {
    if (!read.contains(plan)) {
      return Mismatch(state, "", plan, streams.begin()->first, "no engine read the plan");
    }
  }
  return OkStatus();
}

}  // namespace weightwire::epoch
