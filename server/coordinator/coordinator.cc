#include "server/coordinator/coordinator.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "server/base/failpoint.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/command_queue.h"
#include "server/coordinator/epoch_scheduler.h"
#include "server/coordinator/integrity_check.h"
#include "server/coordinator/leases.h"
#include "server/coordinator/membership.h"
#include "server/coordinator/negotiation.h"
#include "server/coordinator/plan_cache.h"
#include "server/coordinator/shared_slices.h"
#include "server/plan/explain.h"

namespace weightwire::coordinator {
namespace {

constexpr Nanos kGauges = std::chrono::milliseconds(50);
/// Between two words to watchers that more has arrived: agents say so as often.
constexpr Nanos kProgress = std::chrono::seconds(1);

Status ShuttingDown() {
  return Status(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
}

struct Recovered {
  CommitRecord committed;
  std::vector<DrainMark> drained;
  Epoch first{1};
  JournalId history{};
};

JournalId RandomHistory(const Options& options) {
  const Ticket random = options.random_ticket();
  JournalId history{1};
  for (size_t i = 0; i < 8; ++i) history.value = history.value << 8 ^ random[i];
  return history.value == 0 ? JournalId(1) : history;
}

/// The last decision, the first number above everything that was decided or reserved, and who is
/// drained.
Recovered Recover(const std::vector<JournalRecord>& records, const Options& options) {
  Recovered recovered;
  for (const JournalRecord& record : records) {
    if (const auto* reserve = std::get_if<ReserveRecord>(&record)) {
      recovered.first = std::max(recovered.first, reserve->limit);
      if (reserve->history != JournalId{}) recovered.history = reserve->history;
    }
    if (const auto* commit = std::get_if<CommitRecord>(&record)) {
      recovered.first = std::max(recovered.first, Epoch(commit->epoch.value + 1));
      if (commit->epoch > recovered.committed.epoch) recovered.committed = *commit;
    }
    if (const auto* drain = std::get_if<DrainRecord>(&record)) recovered.drained = drain->marks;
  }
  if (recovered.history == JournalId{}) recovered.history = RandomHistory(options);
  return recovered;
}

/// Joins the parts: membership and leases, negotiation, plans, the scheduler of epochs.
class CoordinatorImpl final : public Coordinator, private Membership::Observer {
 public:
  CoordinatorImpl(Options options, Clock& clock, Executor& strand, Executor& workers,
                  Journal& journal, metrics::Sink& metrics, Recovered recovered)
      : options_(std::move(options)),
        clock_(clock),
        strand_(strand),
        workers_(workers),
        journal_(journal),
        metrics_(metrics),
        commands_(strand),
        membership_(options_, recovered.history, std::move(recovered.drained), commands_, *this,
                    metrics),
        leases_(options_, clock, strand, membership_),
        work_(options_.work == nullptr ? std::make_shared<const Work>() : options_.work),
        negotiation_(strand, workers, work_, membership_, commands_, *this, metrics),
        plans_(clock, strand, workers, work_, metrics),
        slices_(strand, workers),
        integrity_(clock, strand, workers, membership_, metrics),
        scheduler_({options_, clock, strand, membership_, plans_, commands_, journal, metrics},
                   std::move(recovered.committed), recovered.first, recovered.history,
                   [this] { Changed(); }) {
    scheduler_.Start();
  }

  // ---- agents ----
  void OpenSession(control::AgentHello hello, control::AgentPort* port,
                   control::Reply<control::AgentWelcome> reply) override {
    if (stopping_) return commands_.Reply<control::AgentWelcome>(reply, Fail(ShuttingDown()));
    auto welcome = membership_.Open(std::move(hello), port, clock_.Now());
    WW_FAILPOINT("coordinator.after_session_opened_before_welcome");
    commands_.Reply<control::AgentWelcome>(std::move(reply), std::move(welcome));
    leases_.Watch();
  }

  void CloseSession(AgentId agent) override { membership_.AgentLeft(agent); }

  void Disconnected(AgentId agent) override {
    membership_.Disconnected(agent, clock_.Now());
    leases_.Watch();
  }

  void Heartbeat(AgentId agent, control::Beat beat) override {
    if (!membership_.sessions().contains(agent)) return Fenced("stale_session");
    if (membership_.Heard(agent, clock_.Now(), std::move(beat))) TellProgressSoon();
  }

  void Register(control::RegisterRequest request,
                control::Reply<control::RegisterReply> reply) override {
    if (stopping_) return commands_.Reply<control::RegisterReply>(reply, Fail(ShuttingDown()));
    auto registered = membership_.Register(request);
    WW_FAILPOINT("coordinator.after_register_before_answer");
    if (!registered && registered.error().reason() == Reason::kDuplicateRank &&
        membership_.AwaitsLease(request) && awaiting_lease_.size() < options_.members_max) {
      awaiting_lease_.emplace_back(std::move(request), std::move(reply));
      return;
    }
    if (!registered) CountFence(registered.error());
    if (registered) {
      registered->lineage = scheduler_.decisions().Floor().lineage;
      registered->floor = scheduler_.decisions().Floor().version;
      scheduler_.OnRejoinState(request.group + "/" + std::to_string(request.rank), request.claim);
    }
    commands_.Reply<control::RegisterReply>(std::move(reply), std::move(registered));
  }

  void SubmitLayout(control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override {
    if (stopping_) return commands_.Reply<control::LayoutReply>(reply, Fail(ShuttingDown()));
    negotiation_.Submit(std::move(submission), std::move(reply));
  }

  void Publish(control::PublishRequest request, control::Done done) override {
    Status status = scheduler_.Publish(request);
    CountFence(status);
    commands_.Reply(std::move(done), std::move(status));
  }

  void Withdraw(control::WithdrawRequest request, control::Done done) override {
    Status status = scheduler_.Withdraw(request);
    CountFence(status);
    commands_.Reply(std::move(done), std::move(status));
  }

  void FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                  control::Reply<std::shared_ptr<const plan::RankSlice>> reply) override {
    using Slice = std::shared_ptr<const plan::RankSlice>;
    const PlannedPairPtr pair = plans_.Find(plan);
    if (const auto hash_plan = pair ? nullptr : integrity_.Find(plan)) {
      return ReadingSlice(hash_plan, side, rank, std::move(reply));
    }
    if (pair == nullptr) return commands_.Reply<Slice>(reply, Fail(UnknownPlan(plan)));
    const uint32_t ranks =
        side == plan::Side::kSource ? pair->plan->source_ranks : pair->plan->target_ranks;
    if (rank >= ranks || (side != plan::Side::kSource && side != plan::Side::kTarget)) {
      return commands_.Reply<Slice>(
          reply, Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                      "the plan has " + std::to_string(ranks) + " ranks on that side"));
    }
    slices_.Get(
        {plan, side, rank},
        [pair, side, rank, work = work_] { return work->Slice(*pair->plan, side, rank); },
        std::move(reply));
  }

  void Report(AgentId agent, epoch::Report report) override {
    const epoch::Member member = std::visit([](const auto& r) { return r.member; }, report);
    const auto place = membership_.Find(member);
    if (!place) return Fenced("stale_incarnation");
    const auto* lost = std::get_if<epoch::LostReport>(&report);
    if (lost != nullptr && IsItsAgent(*place->live, agent)) {
      return membership_.Lose(member, lost->why);
    }
    if (place->live->agent != agent) return Fenced("wrong_agent");
    if (place->live->presence != Presence::kConnected) return Fenced("stale_session");
    const auto* attested = std::get_if<epoch::HashedReport>(&report);
    if (attested != nullptr ? !integrity_.OnAttested(*attested) : !scheduler_.OnReport(report)) {
      Fenced("stale_epoch");
    }
  }

  // ---- operators ----
  Status Commit(Epoch epoch) override { return scheduler_.Commit(epoch); }
  Status Abort(Epoch epoch, std::string why) override { return scheduler_.Abort(epoch, why); }

  void Rollback(Version version, control::Reply<RolledBack> reply) override {
    scheduler_.Rollback(version, [this, reply = std::move(reply)](Result<RolledBack> result) {
      commands_.Reply<RolledBack>(reply, std::move(result));
    });
  }

  void Verify(const std::string& engine, Nanos deadline,
              control::Reply<IntegrityReport> reply) override {
    integrity_.Verify(engine, deadline, [this, reply = std::move(reply)](auto result) {
      commands_.Reply<IntegrityReport>(reply, std::move(result));
    });
  }

  Status Evict(const std::string& name, std::string why) override {
    const Group* group = membership_.FindGroup(name);
    if (group == nullptr || group->taken() == 0) {
      return Status(Code::kNotFound, Reason::kNotRegistered, "no group '" + name + "' is here");
    }
    membership_.EvictGroup(
        name, Status(Code::kAborted, Reason::kMemberLost, "evicted by request: " + why));
    return OkStatus();
  }

  void Drain(const std::string& name, Draining what, DrainOf which,
             control::Reply<std::vector<std::string>> reply) override {
    using Engines = std::vector<std::string>;
    auto engines = membership_.Drain(name, what, which);
    if (!engines) return commands_.Reply<Engines>(reply, std::move(engines));
    JournalMarks([this, engines = std::move(*engines), reply](const Status& status) {
      if (!status.ok()) return commands_.Reply<Engines>(reply, Fail(status));
      WW_FAILPOINT("coordinator.after_a_drain_is_durable_before_its_answer");
      commands_.Reply<Engines>(reply, engines);
    });
  }

  Result<EpochTrace> Describe(Epoch epoch) const override {
    WW_ASSIGN(EpochTrace trace, scheduler_.Describe(epoch));
    trace.status.content_root = integrity_.RootOf(trace.status.epoch);
    return trace;
  }

  std::vector<EpochEdges> Edges() const override { return scheduler_.Edges(); }

  using Coordinator::Snapshot;
  StatusSnapshot Snapshot(const StatusQuery& query) const override {
    StatusSnapshot snapshot;
    snapshot.job = options_.job;
    snapshot.agents = static_cast<uint32_t>(membership_.sessions().size());
    snapshot.engines_forgotten = membership_.forgotten();
    scheduler_.Describe(query, snapshot);
    for (EpochStatus& epoch : snapshot.epochs) epoch.content_root = integrity_.RootOf(epoch.epoch);
    const bool all = query.participants_max == std::numeric_limits<size_t>::max();
    const std::set<std::string, std::less<>> awaited = all || query.participants_max == 0
                                                           ? std::set<std::string, std::less<>>()
                                                           : RanksNamedIn(snapshot);
    for (const auto& [name, group] : membership_.groups()) {
      const size_t taken = group.taken();
      snapshot.participants_total += taken;
      if (group.role == control::GroupRole::kTrainer) snapshot.trainers_total += taken;
      if (query.epochs_before != Epoch{}) continue;
      if (query.participants_max > 0) {
        AddParticipants(group, query.participants_max, awaited, snapshot);
      }
      if (group.role == control::GroupRole::kEngine) AddEngine(group, snapshot);
    }
    return snapshot;
  }

  Result<std::string> Explain(const std::string& group, const std::string& tensor) const override {
    std::string text;
    std::map<PlanId, std::string> seen;
    for (const auto& [engine, pair] : scheduler_.newest_plans()) {
      if (!group.empty() && engine != group) continue;
      WW_FAIL_IF_ERROR(CheckTensor(*pair, tensor));
      if (const auto [first, fresh] = seen.emplace(pair->plan->id, engine); !fresh) {
        text += engine + ": the same plan as " + first->second + "\n";
        continue;
      }
      text += engine + ":\n" +
              plan::Explain(*pair->plan, pair->source->model, pair->target->model, tensor,
                            {TrainerName(), engine});
    }
    if (text.empty()) {
      return Fail(
          Code::kNotFound, Reason::kNotRegistered,
          group.empty() ? "nothing has been planned yet" : "no plan is known for '" + group + "'");
    }
    return text;
  }

  Result<std::shared_ptr<const plan::TransferPlan>> FindPlan(PlanId plan) const override {
    const PlannedPairPtr pair = plans_.Find(plan);
    if (pair == nullptr) return Fail(UnknownPlan(plan));
    return pair->plan;
  }

  uint64_t Watch(std::function<void()> changed) override {
    watchers_.emplace(++last_watcher_, std::move(changed));
    return last_watcher_;
  }
  void Unwatch(uint64_t id) override { watchers_.erase(id); }

  Status Readiness() const override { return scheduler_.Readiness(); }

  void Shutdown(control::Done done) override {
    stopping_ = true;
    integrity_.Shutdown(ShuttingDown());
    scheduler_.Shutdown([this, done = std::move(done)] {
      std::vector<AgentId> agents;
      for (const auto& [id, session] : membership_.sessions()) agents.push_back(id);
      for (AgentId agent : agents) membership_.EndSession(agent, ShuttingDown(), clock_.Now());
      AnswerRegisters();
      commands_.Reply(done, OkStatus());
    });
  }

 private:
  // ---- Membership::Observer ----
  void OnLost(const Group& group, uint32_t rank, const epoch::Member& member,
              const Status& why) override {
    scheduler_.OnLost(group, rank, member, why);
    integrity_.OnLost(group, rank, member, why);
  }
  void OnCutOff(Group& group, uint32_t rank, const epoch::Member& member,
                const Status& why) override {
    scheduler_.OnCutOff(group, rank, member, why);
    integrity_.OnLost(group, rank, member, why);
  }
  void OnComplete(Group& group) override { scheduler_.OnComplete(group); }
  /// Comes in the middle of a change: what can start now starts in a task of its own.
  void OnMembershipChanged() override { Changed(); }

  void Changed() {
    if (change_posted_) return;
    change_posted_ = true;
    strand_.Post(cancel_.Bind([this] {
      AnswerRegisters();
      scheduler_.TryStart();
      change_posted_ = false;
      // Who leaves because this coordinator does is drained for the next one.
      if (!stopping_ && membership_.TakeMarksLeft()) JournalMarks([](const Status&) {});
      UpdateGaugesSoon();
      Sweep();
      TellWatchers();
    }));
  }

  std::string TrainerName() const {
    const auto& groups = membership_.groups();
    const auto trainer = std::ranges::find_if(groups, [](const auto& entry) {
      return entry.second.role == control::GroupRole::kTrainer;
    });
    return trainer == groups.end() ? "trainer" : trainer->first;
  }

  void TellWatchers() {
    const auto watchers = watchers_;
    for (const auto& [id, changed] : watchers) {
      if (watchers_.contains(id)) changed();
    }
  }

  /// For all agents together: each says with every heartbeat how far it is.
  void TellProgressSoon() {
    if (watchers_.empty() || std::exchange(progress_due_, true)) return;
    strand_.PostAfter(kProgress, cancel_.Bind([this] {
      progress_due_ = false;
      TellWatchers();
    }));
  }

  /// Of the session that registered the rank, or of a later one of the same agent.
  bool IsItsAgent(const Rank& rank, AgentId agent) const {
    if (rank.agent == agent) return true;
    const auto session = membership_.sessions().find(agent);
    return rank.presence != Presence::kConnected && session != membership_.sessions().end() &&
           session->second.hello.incarnation == rank.agent_incarnation;
  }

  /// Those whose place is not a suspect's any more.
  void AnswerRegisters() {
    auto waiting = std::exchange(awaiting_lease_, {});
    for (auto& [request, reply] : waiting) {
      const bool waits = !stopping_ && membership_.sessions().contains(request.agent) &&
                         membership_.AwaitsLease(request);
      if (waits) {
        awaiting_lease_.emplace_back(std::move(request), std::move(reply));
      } else {
        Register(std::move(request), std::move(reply));
      }
    }
  }

  void JournalMarks(std::function<void(Status)> done) {
    journal_.Append(DrainRecord{membership_.Marks()}, cancel_.Bind(std::move(done)));
  }

  /// They walk over all groups, which thousands of registrations must not do each.
  void UpdateGaugesSoon() {
    if (std::exchange(gauges_due_, true)) return;
    strand_.PostAfter(kGauges, cancel_.Bind([this] {
      gauges_due_ = false;
      UpdateGauges();
    }));
  }

  /// Once every `verify_every` versions that were committed and are served.
  void Sweep() {
    if (options_.verify_every == 0 || scheduler_.served() == counted_) return;
    counted_ = scheduler_.served();
    if (++commits_ % options_.verify_every != 0 || stopping_) return;
    integrity_.Verify("", options_.verify_deadline, [](const Result<IntegrityReport>&) {
      // Counted by outcome; one that could not begin because another runs is not missed.
    });
  }

  void ReadingSlice(const std::shared_ptr<const content::HashPlan>& hash_plan, plan::Side side,
                    uint32_t rank, control::Reply<std::shared_ptr<const plan::RankSlice>> reply) {
    using Slice = std::shared_ptr<const plan::RankSlice>;
    if (side != plan::Side::kSource || rank >= hash_plan->ranks.size()) {
      return commands_.Reply<Slice>(
          reply, Fail(Code::kInvalidArgument, Reason::kInvalidRequest,
                      "the content has " + std::to_string(hash_plan->ranks.size()) +
                          " ranks, on the source's side"));
    }
    slices_.Get(
        {hash_plan->id, side, rank},
        [hash_plan, rank] {
          return std::make_shared<const plan::RankSlice>(content::SliceOf(*hash_plan, rank));
        },
        std::move(reply));
  }

  void UpdateGauges() {
    membership_.Forget(clock_.Now());
    std::map<std::pair<control::GroupRole, bool>, int> counts;
    std::map<control::GroupRole, int> cut_off;
    for (const auto& [name, group] : membership_.groups()) {
      for (const Slot& slot : group.slots) {
        if (slot.connected()) ++counts[{group.role, slot.live->layout != nullptr}];
        if (slot.live && !slot.connected()) ++cut_off[group.role];
      }
    }
    for (const auto role : {control::GroupRole::kTrainer, control::GroupRole::kEngine}) {
      for (const bool ready : {false, true}) {
        metrics_.Set("members", counts[{role, ready}],
                     {{"role", role == control::GroupRole::kTrainer ? "trainer" : "engine"},
                      {"state", ready ? "ready" : "registered"}});
      }
      metrics_.Set("members", cut_off[role],
                   {{"role", role == control::GroupRole::kTrainer ? "trainer" : "engine"},
                    {"state", "cut_off"}});
    }
    uint64_t not_ready = 0, behind = 0, drained = 0;
    for (const auto& [name, group] : membership_.groups()) {
      if (group.role != control::GroupRole::kEngine || !group.Complete()) continue;
      drained += group.drained ? 1 : 0;
      if (group.drained) continue;  // it is meant to stay behind
      not_ready += scheduler_.IsReady(group) ? 0 : 1;
      behind = std::max(behind, scheduler_.LagOf(group).value);
    }
    metrics_.Set("engines_not_ready", static_cast<double>(not_ready));
    metrics_.Set("versions_behind_max", static_cast<double>(behind));
    metrics_.Set("engines_drained", static_cast<double>(drained));
  }

  /// "engine-a/1" of every "engine-a/1: staged".
  static std::set<std::string, std::less<>> RanksNamedIn(const StatusSnapshot& snapshot) {
    std::set<std::string, std::less<>> ranks;
    const auto add = [&](const std::string& text) {
      std::istringstream words(text);
      for (std::string word; words >> word;) {
        if (!word.ends_with(':') || word.find('/') == std::string::npos) continue;
        word.pop_back();
        ranks.insert(std::move(word));
      }
    };
    add(snapshot.waiting_for);
    for (const EpochStatus& epoch : snapshot.epochs) {
      for (const std::string& line : epoch.waiting_for) add(line);
    }
    return ranks;
  }

  void AddParticipants(const Group& group, size_t most,
                       const std::set<std::string, std::less<>>& awaited,
                       StatusSnapshot& snapshot) const {
    for (uint32_t rank = 0; rank < group.world_size(); ++rank) {
      const auto& live = group.slots[rank].live;
      if (!live) continue;
      const bool first = group.role == control::GroupRole::kTrainer && rank == 0;
      if (snapshot.participants.size() >= most && !first &&
          !awaited.contains(group.RankName(rank))) {
        continue;
      }
      ParticipantStatus status;
      status.member = live->member;
      status.role = group.role;
      status.group = group.name;
      status.rank = rank;
      status.world_size = group.world_size();
      status.agent = live->agent;
      status.agent_name = live->agent_name;
      status.presence = PresenceName(live->presence);
      if (live->presence != Presence::kConnected) {
        status.cut_seconds = std::chrono::duration<double>(clock_.Now() - live->cut_at).count();
      }
      status.silent_seconds = scheduler_.SilentSeconds(live->member);
      status.pid = live->pid;
      status.spec = live->spec;
      status.has_layout = live->layout != nullptr;
      status.tensors = live->layout == nullptr ? 0 : live->layout->tensors.size();
      status.bytes = live->bytes;
      snapshot.participants.push_back(std::move(status));
    }
  }

  void AddEngine(const Group& group, StatusSnapshot& snapshot) const {
    EngineStatus status;
    status.name = group.name;
    status.state = scheduler_.StateOf(group);
    status.serving = group.serving;
    status.version = group.version;
    status.lineage = scheduler_.decisions().LineageOf(group.serving);
    status.ranks_present = group.present();
    status.world_size = group.world_size();
    status.lag = scheduler_.LagOf(group);
    status.ready = scheduler_.IsReady(group);
    status.held = group.Held();
    status.last_error = group.last_error;
    status.drained = group.drained;
    if (group.drained) status.busy_with = scheduler_.BusyWith(group);
    snapshot.engines.push_back(std::move(status));
  }

  static Status CheckTensor(const PlannedPair& pair, const std::string& tensor) {
    if (tensor.empty() || pair.source->model.canonical.Find(tensor)) return OkStatus();
    return Status(Code::kNotFound, Reason::kTensorMissing, "the model has no such tensor")
        .AtTensor(tensor);
  }

  static Status UnknownPlan(PlanId plan) {
    return Status(Code::kNotFound, Reason::kNotRegistered,
                  "plan " + plan.ToHex() + " is not known (any more)");
  }

  void Fenced(const char* cause) { metrics_.Add("fenced_requests_total", 1, {{"cause", cause}}); }
  void CountFence(const Status& status) {
    if (status.reason() == Reason::kStaleIncarnation) Fenced("stale_incarnation");
  }

  const Options options_;
  Clock& clock_;
  Executor& strand_;
  Executor& workers_;
  Journal& journal_;
  metrics::Sink& metrics_;
  CommandQueue commands_;
  Membership membership_;
  Leases leases_;
  const std::shared_ptr<const Work> work_;
  Negotiation negotiation_;
  PlanCache plans_;
  SharedSlices slices_;
  IntegrityCheck integrity_;
  EpochScheduler scheduler_;
  Epoch counted_{};  ///< newest version that Sweep has seen
  uint64_t commits_ = 0;
  bool stopping_ = false;
  /// For places whose lease runs out.
  std::vector<std::pair<control::RegisterRequest, control::Reply<control::RegisterReply>>>
      awaiting_lease_;
  bool change_posted_ = false;
  bool gauges_due_ = false;
  bool progress_due_ = false;
  uint64_t last_watcher_ = 0;
  std::map<uint64_t, std::function<void()>> watchers_;
  CancelToken cancel_;
};

}  // namespace

std::string_view EngineStateName(EngineState state) {
  switch (state) {
    case EngineState::kIncomplete:
      return "incomplete";
    case EngineState::kEmpty:
      return "empty";
    case EngineState::kFilling:
      return "filling";
    case EngineState::kServing:
      return "serving";
    case EngineState::kStaged:
      return "staged";
    case EngineState::kInstalling:
      return "installing";
    case EngineState::kDirty:
      return "dirty";
    case EngineState::kCutOff:
      return "cut_off";
  }
  return "unknown";
}

Result<std::unique_ptr<Coordinator>> Coordinator::Make(Options options, Clock& clock,
                                                       Executor& strand, Executor& workers,
                                                       Journal& journal, metrics::Sink& metrics) {
  WW_CHECK(options.random_ticket != nullptr);
  WW_FAILPOINT("coordinator.before_replay");
  WW_ASSIGN(const std::vector<JournalRecord> records, journal.Read());
  Recovered recovered = Recover(records, options);
  WW_FAILPOINT("coordinator.after_replay");
  return std::make_unique<CoordinatorImpl>(std::move(options), clock, strand, workers, journal,
                                           metrics, std::move(recovered));
}

}  // namespace weightwire::coordinator
