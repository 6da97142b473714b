#include "server/coordinator/version_queue.h"

#include <algorithm>
#include <utility>

namespace weightwire::coordinator {
namespace {

Status Stale(const VersionId& id, const VersionId& than, const std::string& more) {
  const std::string next = std::to_string(id.lineage + 1);
  return Status(Code::kFailedPrecondition, Reason::kStaleVersion,
                ToString(id) + " is not newer than " + ToString(than) + more)
      .Remedy(
          "publish a higher version; a trainer that goes on from an earlier step says so: its "
          "ranks attach anew and publish with lineage=" +
          next + ", or in a new process lineage=\"resume\"");
}

}  // namespace

Status VersionQueue::Add(const control::PublishRequest& request, uint32_t rank, Version published,
                         uint64_t generation, Nanos now) {
  const Version version = request.version;
  const VersionId id{std::max(request.lineage, kFirstLineage), version};
  const auto withdrawn = withdrawn_.find(rank);
  if (request.number != 0 && withdrawn != withdrawn_.end() &&
      withdrawn->second.first == request.member && request.number <= withdrawn->second.second) {
    return Status(Code::kAborted, Reason::kAbortRequested,
                  "version " + std::to_string(version.value) + " was withdrawn by its publisher");
  }
  DropDeserted();
  PendingVersion* known = Find(version);
  if (known != nullptr) {
    if (known->manual_commit != request.manual_commit) {
      return Status(
          Code::kInvalidArgument, Reason::kInvalidRequest,
          "the ranks do not agree on manual_commit of version " + std::to_string(version.value));
    }
    if (known->lineage != id.lineage) {
      return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                    "the ranks do not agree on the lineage of version " +
                        std::to_string(version.value) + ": " + std::to_string(known->lineage) +
                        " and " + std::to_string(id.lineage))
          .Remedy("give every rank the same one");
    }
    const auto holder = known->ranks.find(rank);
    if (holder != known->ranks.end() && holder->second == request.member) {
      known->numbers[rank] = std::max(known->numbers[rank], request.number);
      return OkStatus();
    }
    // A rank that withdrew it is back before the attempt that this ended is over.
    const bool again = holder == known->ranks.end() && known->generation == generation;
    if (known->running && !again) {
      return Status(Code::kFailedPrecondition, Reason::kNotReady,
                    "version " + std::to_string(version.value) +
                        " of the trainer's previous life is still being aborted")
          .Remedy("publish again in a moment");
    }
  }
  if (id <= floor_) return Stale(id, floor_, "");
  if (version <= published) {
    return Stale(id, {id.lineage, published}, ", which this rank has published");
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
    known->lineage = id.lineage;
    known->generation = generation;
    known->manual_commit = request.manual_commit;
    known->deadline = now + request.deadline;
    known->trace_id = request.trace_id;
  }
  known->deadline = std::min(known->deadline, now + request.deadline);
  known->ranks[rank] = request.member;
  known->published[rank] = now;
  known->numbers[rank] = request.number;
  return OkStatus();
}

bool VersionQueue::Withdraw(const control::WithdrawRequest& request, uint32_t rank) {
  auto& [member, last] = withdrawn_[rank];
  last = member == request.member ? std::max(last, request.number) : request.number;
  member = request.member;
  PendingVersion* known = Find(request.version);
  if (known == nullptr) return false;
  const auto holder = known->ranks.find(rank);
  if (holder == known->ranks.end() || holder->second != request.member ||
      known->numbers[rank] > request.number) {
    return false;
  }
  known->ranks.erase(holder);
  known->published.erase(rank);
  known->numbers.erase(rank);
  DropDeserted();
  return true;
}

/// A version that every rank took back is as if it had never been published.
void VersionQueue::DropDeserted() {
  std::erase_if(versions_, [](const auto& entry) {
    return entry.second.ranks.empty() && !entry.second.running;
  });
}

PendingVersion* VersionQueue::Head(uint32_t world_size) {
  DropDeserted();
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
  for (const PendingVersion& pending : taken) floor_ = std::max(floor_, pending.id());
  return taken;
}

std::vector<PendingVersion> VersionQueue::TakeBelow(const VersionId& id) {
  return TakeIf([&](const PendingVersion& p) { return p.id() < id; });
}

std::vector<PendingVersion> VersionQueue::TakeUpTo(const VersionId& id) {
  return TakeIf([&](const PendingVersion& p) { return p.id() <= id; });
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
  floor_ = std::max(floor_, taken.id());
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
