#include "server/coordinator/rejoin.h"

#include <algorithm>
#include <string>

namespace weightwire::coordinator {
namespace {

using control::RejoinState;

tl::unexpected<Status> DoNotFit(const std::string& what) {
  return Fail(Status(Code::kAborted, Reason::kStaleEpoch, what)
                  .Remedy("nothing is lost: the engine attaches again and is filled"));
}

std::string NameOf(const epoch::Content& content) {
  if (content.epoch == Epoch{}) return "nothing";
  return "epoch " + std::to_string(content.epoch.value) + " (version " +
         std::to_string(content.version.value) + ")";
}

/// Ranks that have staged an epoch above this one.
std::vector<uint32_t> StagedAbove(const std::vector<RejoinState>& claims, Epoch epoch) {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < claims.size(); ++rank) {
    if (claims[rank].staged > epoch) ranks.push_back(rank);
  }
  return ranks;
}

/// What `claim`, whose epoch was decided, would serve; the version is 0 when nobody says it.
epoch::Content ContentOf(const RejoinState& claim, const std::vector<RejoinState>& claims,
                         const epoch::Content& newest) {
  epoch::Content content{claim.content, claim.version};
  if (content.epoch == newest.epoch) content.version = newest.version;
  for (const RejoinState& other : claims) {
    if (other.serving.epoch == content.epoch) content.version = other.serving.version;
  }
  return content;
}

Result<epoch::Content> CommonlyServed(const std::vector<RejoinState>& claims) {
  const epoch::Content& first = claims.front().serving;
  for (const RejoinState& claim : claims) {
    if (claim.serving == first) continue;
    return DoNotFit("its ranks serve different epochs: " + NameOf(first) + " and " +
                    NameOf(claim.serving));
  }
  return first;
}

}  // namespace

Result<RejoinResult> Rejoin(const std::vector<RejoinState>& claims, const CommitRecord& committed) {
  const epoch::Content newest{committed.epoch, committed.version};
  const bool any_committed = committed.epoch != Epoch{};
  const auto decided = [&](const RejoinState& claim) {
    return any_committed && claim.staged != Epoch{} && claim.content <= committed.epoch &&
           (claim.content == committed.epoch || claim.told);
  };
  const auto first = std::find_if(claims.begin(), claims.end(), decided);
  const bool any_decided = first != claims.end();
  const epoch::Content content = any_decided ? ContentOf(*first, claims, newest) : newest;
  const auto swapped = [&](const RejoinState& claim) { return claim.serving == content; };
  const bool goes_on =
      any_decided && content.version != Version{} &&
      std::all_of(claims.begin(), claims.end(), [&](const RejoinState& claim) {
        return swapped(claim) || (claim.content == content.epoch && claim.staged == first->staged);
      });
  RejoinResult rejoined;
  if (goes_on) rejoined.decided = content;
  if (goes_on && std::any_of(claims.begin(), claims.end(), swapped)) {
    rejoined.serving = content;
    rejoined.behind_the_swap = StagedAbove(claims, Epoch{});
    return rejoined;
  }
  const auto common = CommonlyServed(claims);
  if (!common && !goes_on) return Fail(common.error());
  // (An engine with one buffer gives up what it serves rank by rank.)
  if (common) rejoined.serving = *common;
  if (rejoined.serving.epoch > committed.epoch ||
      (rejoined.serving.epoch == committed.epoch && any_committed && rejoined.serving != newest)) {
    return DoNotFit("it serves " + NameOf(rejoined.serving) +
                    ", which was never committed here; committed is " + NameOf(newest));
  }
  if (goes_on) {
    rejoined.unfinished = first->staged;
    return rejoined;
  }
  const auto swapping = std::find_if(claims.begin(), claims.end(),
                                     [](const RejoinState& claim) { return claim.told; });
  if (swapping != claims.end()) {
    return DoNotFit("it was changing to epoch " + std::to_string(swapping->content.value) +
                    " when it lost its coordinator; committed is " + NameOf(newest));
  }
  rejoined.undecided = StagedAbove(claims, committed.epoch);
  return rejoined;
}

}  // namespace weightwire::coordinator
