#include "server/coordinator/communicators.h"

#include <algorithm>
#include <utility>

namespace weightwire::coordinator {
namespace {

constexpr size_t kFencedPerGroup = 1'024;

Status Invalid(const CommunicatorMember& member, std::string message) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::move(message))
      .AtRank(member.Name());
}

Status Stale(const CommunicatorMember& member, CommunicatorEpoch epoch, const std::string& why) {
  return Status(Code::kFailedPrecondition, Reason::kStaleEpoch,
                "communicator epoch " + std::to_string(epoch.value) + " of group '" + member.group +
                    "' is not open" + (why.empty() ? "" : ": " + why))
      .AtRank(member.Name())
      .Remedy("abort the communicator and join again");
}

Status Fenced(const CommunicatorMember& member) {
  return Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
                "another process took this rank over")
      .AtRank(member.Name())
      .Remedy("open a new Collective if this process is the one that should hold the rank");
}

Status ShuttingDown() {
  return Status(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
}

}  // namespace

template <typename T>
void Communicators::Answer(Reply<T> reply, Result<T> result) {
  strand_.Post([reply = std::move(reply), result = std::move(result)]() mutable {
    reply(std::move(result));
  });
}

template <typename T>
void Communicators::Finish(Waiter<T>& waiter, Result<T> result) {
  strand_.Cancel(waiter.timer);
  Answer(std::move(waiter.reply), std::move(result));
}

Status Communicators::CheckJoin(const JoinCommunicator& request) const {
  const CommunicatorMember& member = request.member;
  if (request.size == 0 || member.rank >= request.size) {
    return Invalid(member, "rank " + std::to_string(member.rank) + " does not fit a size of " +
                               std::to_string(request.size));
  }
  if (request.size > limits_.members_max) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "a communicator has at most " + std::to_string(limits_.members_max) + " members")
        .AtRank(member.Name());
  }
  if (member.incarnation == Incarnation{}) return Invalid(member, "the incarnation is 0");
  if (request.deadline <= Nanos(0) || request.deadline > limits_.deadline_max) {
    return Invalid(member, "the deadline must lie between 1 ms and 10 minutes");
  }
  return OkStatus();
}

Result<Communicators::Group*> Communicators::GroupFor(const std::string& name) {
  if (auto found = groups_.find(name); found != groups_.end()) return &found->second;
  if (groups_.size() >= limits_.groups_max) {
    std::erase_if(groups_, [](const auto& entry) { return entry.second.Idle(); });
  }
  if (groups_.size() >= limits_.groups_max) {
    return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                       std::to_string(limits_.groups_max) + " groups have communicators already")
                    .Remedy("close collectives that are not used"));
  }
  return &groups_[name];
}

Status Communicators::CheckAsker(const Group& group, const JoinCommunicator& request) const {
  if (std::ranges::find(group.fenced, request.member.incarnation) != group.fenced.end()) {
    return Fenced(request.member);
  }
  if (group.askers.empty()) return OkStatus();
  const auto& [rank, first] = *group.askers.begin();
  if (first.request.size != request.size) {
    return Invalid(request.member, "asks for " + std::to_string(request.size) + " members, but " +
                                       first.request.member.Name() + " (" +
                                       first.request.participant + ") waits for " +
                                       std::to_string(first.request.size));
  }
  const auto same = group.askers.find(request.member.rank);
  if (same != group.askers.end() &&
      same->second.request.member.incarnation != request.member.incarnation) {
    return Status(Code::kAlreadyExists, Reason::kDuplicateRank,
                  "another process (" + same->second.request.participant + ") waits as this rank")
        .AtRank(request.member.Name())
        .Remedy("give every process its own rank; after a crash, ask again when its wait is over");
  }
  return OkStatus();
}

bool Communicators::MeetsOpen(Group& group, const JoinCommunicator& request,
                              const Reply<FormedCommunicator>& reply) {
  const FormedCommunicator& formed = group.open->formed;
  const CommunicatorMember& member = request.member;
  const bool named = request.last_epoch >= formed.epoch;
  if (member.rank < formed.participants.size()) {
    const Incarnation holder = formed.participants[member.rank].incarnation;
    if (holder == member.incarnation && !named && request.size == formed.participants.size()) {
      Answer<FormedCommunicator>(reply, formed);
      return true;
    }
    if (holder == member.incarnation) {
      EndOpen(group, member.Name() + " asked for a new one");
      return false;
    }
    if (request.size == formed.participants.size()) {
      group.fenced.push_back(holder);
      if (group.fenced.size() > kFencedPerGroup) group.fenced.pop_front();
      EndOpen(group, member.Name() + " was replaced by a new process");
      return false;
    }
  }
  Answer<FormedCommunicator>(
      reply, Fail(Status(Code::kFailedPrecondition, Reason::kNotReady,
                         "communicator epoch " + std::to_string(formed.epoch.value) +
                             " is open with " + std::to_string(formed.participants.size()) +
                             " members, not " + std::to_string(request.size))
                      .AtRank(member.Name())
                      .Remedy("close the Collective of its members first, or use another group")));
  return true;
}

void Communicators::Join(JoinCommunicator request, Reply<FormedCommunicator> reply) {
  auto refuse = [&](Status why) {
    Answer<FormedCommunicator>(std::move(reply), Fail(std::move(why)));
  };
  if (stopping_) return refuse(ShuttingDown());
  if (Status fits = CheckJoin(request); !fits.ok()) return refuse(std::move(fits));
  auto found = GroupFor(request.member.group);
  if (!found) return refuse(std::move(found.error()));
  Group& group = **found;
  if (Status fits = CheckAsker(group, request); !fits.ok()) return refuse(std::move(fits));
  if (group.open && MeetsOpen(group, request, reply)) return;

  const std::string name = request.member.group;
  const uint32_t rank = request.member.rank;
  if (auto before = group.askers.find(rank); before != group.askers.end()) {
    Finish<FormedCommunicator>(
        before->second.waiter,
        Fail(Status(Code::kAborted, Reason::kAbortRequested, "the same member asked again")
                 .AtRank(request.member.Name())));
    group.askers.erase(before);
  }
  const Executor::TimerId timer = strand_.PostAfter(
      request.deadline, cancel_.Bind([this, name, rank] { JoinExpired(name, rank); }));
  const uint32_t size = request.size;
  group.askers.emplace(rank, Asker{std::move(request), {std::move(reply), timer}});
  if (group.askers.size() == size) Complete(group);
}

void Communicators::Complete(Group& group) {
  Open open;
  CommunicatorEpoch last = group.last_epoch;
  for (const auto& [rank, asker] : group.askers) {
    last = std::max(last, asker.request.last_epoch);
    open.formed.participants.push_back(
        {asker.request.member.incarnation, asker.request.participant});
  }
  group.last_epoch = open.formed.epoch = CommunicatorEpoch(last.value + 1);
  group.open = std::move(open);
  for (auto& [rank, asker] : group.askers) {
    Finish<FormedCommunicator>(asker.waiter, group.open->formed);
  }
  group.askers.clear();
}

void Communicators::JoinExpired(const std::string& name, uint32_t rank) {
  Group& group = groups_.at(name);
  const auto asker = group.askers.find(rank);
  const uint32_t size = asker->second.request.size;
  constexpr uint32_t kNamed = 8;
  std::string missing;
  uint32_t count = 0;
  for (uint32_t other = 0; other < size; ++other) {
    if (group.askers.contains(other)) continue;
    if (++count <= kNamed) missing += (missing.empty() ? "" : ", ") + std::to_string(other);
  }
  if (count > kNamed) missing += " and " + std::to_string(count - kNamed) + " more";
  Finish<FormedCommunicator>(
      asker->second.waiter,
      Fail(Status(Code::kDeadlineExceeded, Reason::kMissingRank,
                  "of " + std::to_string(size) + " members these have not asked: " + missing)
               .AtRank(asker->second.request.member.Name())
               .Remedy("start them with the same group and size, then ask again")));
  group.askers.erase(asker);
}

Result<Communicators::Open*> Communicators::OpenFor(const CommunicatorMember& member,
                                                    CommunicatorEpoch epoch) {
  const auto found = groups_.find(member.group);
  if (found == groups_.end()) {
    return Fail(Stale(member, epoch, "this coordinator has not formed it"));
  }
  Group& group = found->second;
  if (std::ranges::find(group.fenced, member.incarnation) != group.fenced.end()) {
    return Fail(Fenced(member));
  }
  if (!group.open || group.open->formed.epoch != epoch) {
    return Fail(Stale(member, epoch, epoch == group.last_epoch ? group.ended_why : ""));
  }
  const auto& participants = group.open->formed.participants;
  if (member.rank >= participants.size() ||
      participants[member.rank].incarnation != member.incarnation) {
    return Fail(
        Status(Code::kFailedPrecondition, Reason::kStaleIncarnation,
               "this process is no member of communicator epoch " + std::to_string(epoch.value))
            .AtRank(member.Name())
            .Remedy("join first"));
  }
  return &*group.open;
}

Status Communicators::Offer(const CommunicatorMember& member, CommunicatorEpoch epoch,
                            std::string unique_id) {
  WW_ASSIGN_OR_STATUS(Open * open, OpenFor(member, epoch));
  if (member.rank != 0) return Invalid(member, "only rank 0 hands over the unique id");
  if (unique_id.empty() || unique_id.size() > limits_.unique_id_bytes_max) {
    return Invalid(member, "a unique id of " + std::to_string(unique_id.size()) + " bytes");
  }
  if (!open->unique_id.empty() && open->unique_id != unique_id) {
    return Status(Code::kAlreadyExists, Reason::kInvalidRequest,
                  "communicator epoch " + std::to_string(epoch.value) + " has another unique id")
        .AtRank(member.Name());
  }
  open->unique_id = std::move(unique_id);
  for (auto& [rank, waiter] : open->waiters) Finish<std::string>(waiter, open->unique_id);
  open->waiters.clear();
  return OkStatus();
}

void Communicators::Await(const CommunicatorMember& member, CommunicatorEpoch epoch, Nanos deadline,
                          Reply<std::string> reply) {
  if (stopping_) return Answer<std::string>(std::move(reply), Fail(ShuttingDown()));
  auto open = OpenFor(member, epoch);
  if (!open) return Answer<std::string>(std::move(reply), Fail(std::move(open.error())));
  if (!(*open)->unique_id.empty()) {
    return Answer<std::string>(std::move(reply), (*open)->unique_id);
  }
  if (deadline <= Nanos(0) || deadline > limits_.deadline_max) {
    return Answer<std::string>(
        std::move(reply),
        Fail(Invalid(member, "the deadline must lie between 1 ms and 10 minutes")));
  }
  const Executor::TimerId timer = strand_.PostAfter(
      deadline, cancel_.Bind([this, name = member.group, epoch, rank = member.rank] {
        AwaitExpired(name, epoch, rank);
      }));
  Waiter<std::string>& waiter = (*open)->waiters[member.rank];
  if (waiter.reply) {
    Finish<std::string>(
        waiter, Fail(Status(Code::kAborted, Reason::kAbortRequested, "the same member asked again")
                         .AtRank(member.Name())));
  }
  waiter = {std::move(reply), timer};
}

void Communicators::AwaitExpired(const std::string& name, CommunicatorEpoch epoch, uint32_t rank) {
  Open& open = *groups_.at(name).open;
  const auto waiter = open.waiters.find(rank);
  Finish<std::string>(waiter->second,
                      Fail(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                                  "rank 0 (" + open.formed.participants[0].participant +
                                      ") has not handed over the unique id of communicator epoch " +
                                      std::to_string(epoch.value))
                               .AtRank(name + "/" + std::to_string(rank))
                               .Remedy("see what rank 0 says; end this epoch and join again")));
  open.waiters.erase(waiter);
}

Status Communicators::End(const CommunicatorMember& member, CommunicatorEpoch epoch,
                          const std::string& why) {
  const auto found = groups_.find(member.group);
  if (found == groups_.end() || epoch > found->second.last_epoch) {
    return Stale(member, epoch, "this coordinator has not formed it");
  }
  Group& group = found->second;
  if (!group.open || epoch < group.open->formed.epoch) return OkStatus();
  if (auto open = OpenFor(member, epoch); !open) return std::move(open.error());
  EndOpen(group, member.Name() + ": " + why);
  return OkStatus();
}

void Communicators::EndOpen(Group& group, const std::string& why) {
  for (auto& [rank, waiter] : group.open->waiters) {
    Finish<std::string>(
        waiter, Fail(Status(Code::kAborted, Reason::kMemberLost,
                            "communicator epoch " + std::to_string(group.open->formed.epoch.value) +
                                " ended: " + why)
                         .Remedy("abort the communicator and join again")));
  }
  group.ended_why = why;
  group.open.reset();
}

void Communicators::Shutdown() {
  stopping_ = true;
  for (auto& [name, group] : groups_) {
    for (auto& [rank, asker] : group.askers) {
      Finish<FormedCommunicator>(asker.waiter, Fail(ShuttingDown()));
    }
    group.askers.clear();
    if (!group.open) continue;
    for (auto& [rank, waiter] : group.open->waiters) {
      Finish<std::string>(waiter, Fail(ShuttingDown()));
    }
    group.open->waiters.clear();
  }
}

}  // namespace weightwire::coordinator
