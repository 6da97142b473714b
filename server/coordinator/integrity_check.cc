#include "server/coordinator/integrity_check.h"

#include <algorithm>
#include <set>
#include <utility>

// A reading is made once for a layout (workers), then each rank of the engine is asked for its
// sums. An engine is closed when all its ranks have answered or the first one could not; when all
// are closed the answers are compared (workers). What comes for an older number is dropped.
namespace weightwire::coordinator {
namespace {

constexpr size_t kReadingsMax = 64;
constexpr size_t kEpochsKept = 2;
constexpr size_t kRootsKept = 256;

Status CannotAttest(const std::string& rank) {
  return Status(Code::kFailedPrecondition, Reason::kProtocolVersion,
                "its agent cannot sum what is served")
      .AtRank(rank)
      .Remedy("run the coordinator's version of weightwired beside it");
}

}  // namespace

void IntegrityCheck::Verify(const std::string& engine, Nanos deadline,
                            control::Reply<IntegrityReport> reply) {
  if (!stopped_.ok()) return reply(weightwire::Fail(stopped_));
  if (run_ && run_->engine == engine) return run_->replies.push_back(std::move(reply));
  if (run_) {
    return reply(weightwire::Fail(
        Status(Code::kFailedPrecondition, Reason::kNotReady, "another verification is in progress")
            .Remedy("wait until it has ended")));
  }
  auto run = std::make_unique<Run>();
  run->number = ++last_number_;
  run->engine = engine;
  run->started = clock_.Now();
  if (Status status = Choose(engine, *run); !status.ok()) {
    return reply(weightwire::Fail(std::move(status)));
  }
  run->replies.push_back(std::move(reply));
  run->open = run->engines.size();
  run->timer = strand_.PostAfter(
      deadline, cancel_.Bind([this, number = run->number] { OnDeadline(number); }));
  run_ = std::move(run);
  std::set<layout::Fingerprint> making;
  for (Asked& asked : run_->engines) {
    const auto found = hash_plans_.find(asked.layout->fingerprint);
    if (found != hash_plans_.end()) {
      asked.answer.hash_plan = found->second;
      Ask(asked);
    } else if (making.insert(asked.layout->fingerprint).second) {
      MakeHashPlan(asked.layout);
    }
  }
}

Status IntegrityCheck::Choose(const std::string& engine, Run& run) {
  for (const auto& [name, group] : membership_.groups()) {
    if (group.role != control::GroupRole::kEngine || (!engine.empty() && name != engine)) continue;
    if (!group.Complete() || group.serving == Epoch{}) continue;
    Asked asked;
    asked.answer.engine.name = name;
    asked.answer.engine.epoch = group.serving;
    asked.answer.engine.version = group.version;
    asked.layout = group.agreed;
    asked.members = group.Members();
    asked.answered.resize(asked.members.size(), false);
    asked.answer.sums.resize(asked.members.size());
    run.engines.push_back(std::move(asked));
  }
  if (!run.engines.empty()) return OkStatus();
  if (!engine.empty() && membership_.FindGroup(engine) == nullptr) {
    return Status(Code::kNotFound, Reason::kNotRegistered, "no engine '" + engine + "' is here");
  }
  return Status(Code::kFailedPrecondition, Reason::kNotReady,
                engine.empty() ? "no engine serves anything yet" : engine + " serves nothing yet");
}

void IntegrityCheck::MakeHashPlan(const AgreedLayoutPtr& layout) {
  auto made = cancel_.Bind([this, number = run_->number, layout](Result<HashPlanPtr> got) {
    HashPlanMade(number, layout->fingerprint, std::move(got));
  });
  workers_.Post([layout, made = std::move(made), &strand = strand_]() mutable {
    auto hash_plan = content::HashPlanOf(layout->model, layout->fingerprint);
    Result<HashPlanPtr> got =
        hash_plan
            ? Result<HashPlanPtr>(std::make_shared<const content::HashPlan>(std::move(*hash_plan)))
            : weightwire::Fail(std::move(hash_plan.error()));
    strand.Post([made = std::move(made), got = std::move(got)]() mutable { made(std::move(got)); });
  });
}

void IntegrityCheck::HashPlanMade(uint64_t number, const layout::Fingerprint& layout,
                                  const Result<HashPlanPtr>& made) {
  if (made) Keep(layout, *made);
  if (!run_ || run_->number != number) return;
  for (Asked& asked : run_->engines) {
    if (asked.done || asked.layout->fingerprint != layout) continue;
    if (!made) {
      Fail(asked, made.error());
      continue;
    }
    asked.answer.hash_plan = hash_plans_.at(layout);
    Ask(asked);
  }
}

void IntegrityCheck::Keep(const layout::Fingerprint& layout, const HashPlanPtr& hash_plan) {
  hash_plans_.try_emplace(layout, hash_plan);
  if (hash_plans_.size() <= kReadingsMax) return;
  // Layouts change rarely: which one goes does not matter, but not one that is in use.
  std::erase_if(hash_plans_, [&](const auto& entry) {
    return entry.first != layout && entry.second.use_count() == 1;
  });
}

std::shared_ptr<const content::HashPlan> IntegrityCheck::Find(PlanId hash_plan) const {
  for (const auto& [layout, known] : hash_plans_) {
    if (known->id == hash_plan) return known;
  }
  return nullptr;
}

void IntegrityCheck::Ask(Asked& asked) {
  asked.awaited = asked.members.size();
  const EngineContent& engine = asked.answer.engine;
  for (uint32_t rank = 0; rank < asked.members.size(); ++rank) {
    const Session* session = membership_.SessionOf(asked.members[rank]);
    const std::string name = engine.name + "/" + std::to_string(rank);
    if (session != nullptr && (session->hello.features & control::kFeatureContentHash) == 0) {
      return Fail(asked, CannotAttest(name));
    }
    membership_.Send(asked.members[rank],
                     epoch::HashCommand{run_->number, engine.epoch, asked.members[rank],
                                        asked.answer.hash_plan->id, rank});
  }
}

bool IntegrityCheck::OnAttested(const epoch::HashedReport& report) {
  if (!run_ || report.verification != run_->number) return false;
  for (Asked& asked : run_->engines) {
    const auto at = std::ranges::find(asked.members, report.member);
    if (at == asked.members.end()) continue;
    const auto rank = static_cast<size_t>(at - asked.members.begin());
    if (asked.done || asked.answered[rank] || !asked.answer.hash_plan) return true;
    if (!report.why.ok()) {
      Fail(asked, report.why);
      return true;
    }
    if (report.sums.size() != asked.answer.hash_plan->ranks[rank].ops.size()) {
      Fail(asked,
           Status(Code::kInternal, Reason::kInternal,
                  "answered with " + std::to_string(report.sums.size()) + " sums for " +
                      std::to_string(asked.answer.hash_plan->ranks[rank].ops.size()) + " blocks")
               .AtRank(asked.answer.engine.name + "/" + std::to_string(rank)));
      return true;
    }
    for (const auto& sum : report.sums) asked.answer.sums[rank].push_back({{sum[0], sum[1]}});
    asked.answered[rank] = true;
    asked.answer.engine.seconds = std::max(asked.answer.engine.seconds, report.seconds);
    if (--asked.awaited == 0) Close(asked);
    return true;
  }
  return false;
}

void IntegrityCheck::OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
                            const Status& why) {
  if (!run_ || run_->judging) return;
  for (Asked& asked : run_->engines) {
    if (asked.done || std::ranges::find(asked.members, member) == asked.members.end()) continue;
    return Fail(asked, Status(why).AtRank(group.RankName(rank)));
  }
}

void IntegrityCheck::Fail(Asked& asked, Status why) {
  asked.answer.engine.superseded = why.reason() == Reason::kStaleEpoch;
  asked.answer.engine.why = std::move(why).AtEpoch(asked.answer.engine.epoch);
  Close(asked);
}

void IntegrityCheck::OnDeadline(uint64_t number) {
  if (!run_ || run_->number != number || run_->judging) return;
  for (Asked& asked : run_->engines) {
    if (asked.done) continue;
    const auto missing = std::ranges::find(asked.answered, false) - asked.answered.begin();
    const std::string rank = asked.answer.engine.name + "/" + std::to_string(missing);
    Fail(asked, Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                       "no sums before the verification's deadline")
                    .AtRank(rank)
                    .Remedy("ask again with a longer --timeout"));
  }
}

void IntegrityCheck::Close(Asked& asked) {
  asked.done = true;
  if (--run_->open > 0) return;
  run_->judging = true;
  strand_.Cancel(run_->timer);
  auto answers = std::make_shared<std::vector<EngineAnswer>>();
  for (Asked& each : run_->engines) answers->push_back(std::move(each.answer));
  auto judged = cancel_.Bind([this, number = run_->number](const auto& result, const auto& found) {
    Judged(number, result, found);
  });
  workers_.Post([answers, known = known_, judged = std::move(judged), &strand = strand_]() mutable {
    std::map<Epoch, KnownContent> found;
    IntegrityReport result = Compare(*answers, known, &found);
    strand.Post([judged = std::move(judged), result = std::move(result),
                 found = std::move(found)]() mutable { judged(result, found); });
  });
}

void IntegrityCheck::Judged(uint64_t number, const IntegrityReport& result,
                            const std::map<Epoch, KnownContent>& found) {
  if (!run_ || run_->number != number) return;
  Learn(result, found);
  const std::unique_ptr<Run> run = std::move(run_);
  IntegrityReport answer = result;
  answer.seconds = std::chrono::duration<double>(clock_.Now() - run->started).count();
  const char* outcome = answer.equal                    ? "equal"
                        : answer.differences_total == 0 ? "incomplete"
                                                        : "different";
  metrics_.Add("content_verifications_total", 1, {{"outcome", outcome}});
  metrics_.Observe("content_verification_seconds", answer.seconds);
  for (const auto& reply : run->replies) reply(answer);
}

void IntegrityCheck::Learn(const IntegrityReport& result,
                           const std::map<Epoch, KnownContent>& found) {
  for (const auto& [epoch, classes] : found) {
    for (const auto& [content_class, leaves] : classes) {
      known_[epoch].try_emplace(content_class, leaves);
    }
  }
  for (const EngineContent& engine : result.engines) {
    if (!found.contains(engine.epoch) || !engine.why.ok()) continue;
    roots_[engine.epoch] = known_[engine.epoch].size() == 1 ? engine.root.ToHex() : "";
  }
  while (known_.size() > kEpochsKept) known_.erase(known_.begin());
  while (roots_.size() > kRootsKept) roots_.erase(roots_.begin());
}

std::string IntegrityCheck::RootOf(Epoch epoch) const {
  const auto found = roots_.find(epoch);
  return found == roots_.end() ? "" : found->second;
}

void IntegrityCheck::Shutdown(const Status& why) {
  stopped_ = why;
  if (!run_) return;
  const std::unique_ptr<Run> run = std::move(run_);
  strand_.Cancel(run->timer);
  for (const auto& reply : run->replies) reply(weightwire::Fail(why));
}

}  // namespace weightwire::coordinator
