#include "server/coordinator/version_queue.h"

#include <algorithm>
#include <utility>

namespace weightwire::coordinator {
namespace {

Status Stale(Version version, const std::string& what) {
  return Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                "version " + std::to_string(version.value) + " " + what)
      .Remedy("publish a higher version; going back is an explicit rollback");
}

}  // namespace

Status VersionQueue::Add(const control::PublishRequest& request, uint32_t rank, Version published,
                         uint64_t generation, Nanos now) {
  const Version version = request.version;
  PendingVersion* known = Find(version);
  if (known != nullptr) {
    if (known->manual_commit != request.manual_commit) {
      return Status(
          Code::kInvalidArgument, Reason::kInvalidRequest,
          "the ranks do not agree on manual_commit of version " + std::to_string(version.value));
    }
    const auto holder = known->ranks.find(rank);
    if (holder != known->ranks.end() && holder->second == request.member) return OkStatus();
    if (known->running) {
      return Status(Code::kFailedPrecondition, Reason::kNotReady,
                    "version " + std::to_string(version.value) +
                        " of the trainer's previous life is still being aborted")
          .Remedy("publish again in a moment");
    }
  }
  if (version <= floor_) {
    return Stale(version, "is not newer than version " + std::to_string(floor_.value));
  }
  if (version <= published) {
    return Stale(version, "is not newer than version " + std::to_string(published.value) +
                              ", which this rank has published");
  }
  if (known == nullptr) {
    const auto waiting = std::count_if(versions_.begin(), versions_.end(),
                                       [](const auto& entry) { return !entry.second.running; });
    if (waiting >= static_cast<int64_t>(waiting_max_)) {
      return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                    std::to_string(waiting) + " versions wait already")
          .Remedy("wait until an earlier one is released");
    }
    known = &versions_[version];
    known->version = version;
    known->generation = generation;
    known->manual_commit = request.manual_commit;
    known->deadline = now + request.deadline;
    known->trace_id = request.trace_id;
  }
  known->deadline = std::min(known->deadline, now + request.deadline);
  known->ranks[rank] = request.member;
  known->published[rank] = now;
  return OkStatus();
}

PendingVersion* VersionQueue::Head(uint32_t world_size) {
  for (auto& [version, pending] : versions_) {
    if (pending.ranks.size() == world_size) return &pending;
  }
  return nullptr;
}

PendingVersion* VersionQueue::Find(Version version) {
  const auto found = versions_.find(version);
  return found == versions_.end() ? nullptr : &found->second;
}

template <typename Wanted>
std::vector<PendingVersion> VersionQueue::TakeIf(const Wanted& wanted) {
  std::vector<PendingVersion> taken;
  for (auto it = versions_.begin(); it != versions_.end();) {
    if (it->second.running || !wanted(it->second)) {
      ++it;
      continue;
    }
    taken.push_back(std::move(it->second));
    it = versions_.erase(it);
  }
  for (const PendingVersion& pending : taken) floor_ = std::max(floor_, pending.version);
  return taken;
}

std::vector<PendingVersion> VersionQueue::TakeBelow(Version version) {
  return TakeIf([version](const PendingVersion& p) { return p.version < version; });
}

std::vector<PendingVersion> VersionQueue::TakeWaiting() {
  return TakeIf([](const PendingVersion&) { return true; });
}

std::vector<PendingVersion> VersionQueue::TakeExpired(Nanos now) {
  return TakeIf([now](const PendingVersion& p) { return p.deadline <= now; });
}

std::vector<PendingVersion> VersionQueue::TakeLetGo(const std::map<uint32_t, Version>& released) {
  return TakeIf([&](const PendingVersion& p) {
    return std::any_of(released.begin(), released.end(),
                       [&](const auto& entry) { return p.version <= entry.second; });
  });
}

std::optional<PendingVersion> VersionQueue::Take(Version version) {
  const auto found = versions_.find(version);
  if (found == versions_.end()) return std::nullopt;
  PendingVersion taken = std::move(found->second);
  versions_.erase(found);
  floor_ = std::max(floor_, version);
  return taken;
}

PendingVersion* VersionQueue::RunningExpired(Nanos now) {
  for (auto& [version, pending] : versions_) {
    if (pending.running && !pending.expired && pending.deadline <= now) return &pending;
  }
  return nullptr;
}

std::optional<Nanos> VersionQueue::NextDeadline() const {
  std::optional<Nanos> next;
  for (const auto& [version, pending] : versions_) {
    if (!pending.expired && (!next || pending.deadline < *next)) next = pending.deadline;
  }
  return next;
}

}  // namespace weightwire::coordinator
