#include "tests/unit/epoch/coordinator_explorer.h"

#include <algorithm>
#include <set>
#include <vector>

#include "tests/unit/epoch/dice.h"

namespace weightwire::epoch::testing {
namespace {

constexpr PlanId kPlan{7, 7};

/// One epoch under test, the members that answer it and the record by which it is judged.
class Run {
 public:
  Run(const StepFn& step, uint64_t seed, Exploration& result)
      : step_(step), dice_(seed), result_(result) {
    fault_percent_ = std::vector<uint64_t>{0, 3, 12, 35}[dice_.Below(4)];
    MakeSpec();
  }

  /// The broken rule; empty when all held.
  std::string Play() {
    Outcome begin = Begin(spec_);
    state_ = begin.state;
    Absorb(begin.actions);
    const size_t steps = 10 + dice_.Below(60);
    for (size_t i = 0; i < steps && broken_.empty() && !finished_; ++i) Deliver(RandomEvent());
    for (int i = 0; i < 400 && broken_.empty() && !Over(); ++i) Deliver(FairEvent());
    Require(Over(), "L2: the epoch ends once faults stop");
    for (int i = 0; i < 6 && broken_.empty(); ++i) Deliver(RandomEvent());
    return broken_;
  }

 private:
  void MakeSpec() {
    uint32_t id = 1;
    auto member = [&] { return Member{ParticipantId(id++), Incarnation(100 + dice_.Below(50))}; };
    spec_.epoch = Epoch(5);
    spec_.content = Epoch(5);
    spec_.version = Version(3);
    spec_.kind = dice_.Percent(25)   ? Kind::kFill
                 : dice_.Percent(20) ? Kind::kRollback
                                     : Kind::kPublish;
    spec_.manual_commit = dice_.Percent(30);
    if (spec_.kind == Kind::kRollback) {
      spec_.held = Epoch(2);
    } else {
      for (size_t i = 1 + dice_.Below(2); i > 0; --i) spec_.sources.push_back(member());
    }
    for (size_t e = 1 + dice_.Below(4); e > 0; --e) {
      EngineMembers engine{"engine-" + std::to_string(e), {}};
      for (size_t i = 1 + dice_.Below(2); i > 0; --i) engine.ranks.push_back(member());
      spec_.engines.push_back(std::move(engine));
    }
    if (spec_.kind == Kind::kPublish && dice_.Percent(50)) {
      spec_.quorum = static_cast<uint32_t>(1 + dice_.Below(spec_.engines.size()));
    }
    spec_.engines_min = static_cast<uint32_t>(dice_.Below(spec_.engines.size() + 1));
    spec_.drops_readers = dice_.Percent(70);
    for (size_t e = 1; e < spec_.engines.size() && spec_.kind != Kind::kRollback; ++e) {
      if (dice_.Percent(40)) {
        spec_.parents[spec_.engines[e].name] = spec_.engines[dice_.Below(e)].name;
      }
    }
    corrupt_ = !spec_.sources.empty() && dice_.Percent(fault_percent_);
  }

  bool Over() const { return finished_ || stopped_; }
  /// It appends; a rollback does so without moving a byte.
  bool Published() const { return spec_.kind != Kind::kFill; }

  void Require(bool holds, const std::string& rule) {
    if (!holds && broken_.empty()) broken_ = rule;
  }
  void Reach(const std::string& branch) { ++result_.reached[branch]; }

  // ---- members ----
  std::vector<Member> All() const {
    std::vector<Member> all = spec_.sources;
    for (const auto& engine : spec_.engines) {
      all.insert(all.end(), engine.ranks.begin(), engine.ranks.end());
    }
    return all;
  }
  std::vector<Member> Targets() const {
    const std::vector<Member> all = All();
    return {all.begin() + static_cast<std::ptrdiff_t>(spec_.sources.size()), all.end()};
  }
  bool IsSource(const Member& m) const {
    return std::count(spec_.sources.begin(), spec_.sources.end(), m) > 0;
  }
  const EngineMembers* EngineOf(const Member& m) const {
    for (const auto& engine : spec_.engines) {
      if (std::count(engine.ranks.begin(), engine.ranks.end(), m) > 0) return &engine;
    }
    return nullptr;
  }
  bool Known(const Member& m) const { return IsSource(m) || EngineOf(m) != nullptr; }

  /// Streams are numbered source place × 8 + target place in the engine, as a plan's would be.
  static uint64_t TrueDigest(uint32_t stream) { return 1000 + stream * 17; }
  std::vector<Digest> SourceDigests(const Member& m) const {
    size_t place = 0;
    while (spec_.sources[place] != m) ++place;
    std::vector<Digest> digests;
    for (const auto& engine : spec_.engines) {
      const PlanId plan{kPlan.high, engine.ranks.size()};
      for (size_t rank = 0; rank < engine.ranks.size(); ++rank) {
        const auto stream = static_cast<uint32_t>(place * 8 + rank);
        const Digest digest{plan, stream, TrueDigest(stream)};
        if (std::count(digests.begin(), digests.end(), digest) == 0) digests.push_back(digest);
      }
    }
    return digests;
  }
  std::vector<Digest> TargetDigests(const Member& m) {
    const EngineMembers& engine = *EngineOf(m);
    size_t rank = 0;
    while (engine.ranks[rank] != m) ++rank;
    std::vector<Digest> digests;
    for (size_t place = 0; place < spec_.sources.size(); ++place) {
      const auto stream = static_cast<uint32_t>(place * 8 + rank);
      digests.push_back({PlanId{kPlan.high, engine.ranks.size()}, stream, TrueDigest(stream)});
    }
    if (corrupt_ && dice_.Percent(50)) digests[dice_.Below(digests.size())].digest ^= 1;
    if (corrupt_ && dice_.Percent(20)) digests.pop_back();
    return digests;
  }

  // ---- events ----
  Event ReportOf(size_t kind, const Member& m) {
    const Status why(Code::kUnavailable, Reason::kTransportFailed, "test");
    switch (kind) {
      case 0:
        return PreparedEvent{m};
      case 1:
        return SourceDoneEvent{m, IsSource(m) ? SourceDigests(m) : std::vector<Digest>{}};
      case 2:
        return StagedEvent{m, EngineOf(m) != nullptr ? TargetDigests(m) : std::vector<Digest>{}};
      case 3:
        return SwappedEvent{m};
      case 4:
        return DrainedEvent{m};
      case 5:
        return FailedEvent{m, why, dice_.Percent(40)};
      default:
        return LostEvent{m, why};
    }
  }

  Event RandomEvent() {
    if (!inbox_.empty() && !dice_.Percent(fault_percent_)) return TakeFromInbox();
    const Status asked(Code::kAborted, Reason::kAbortRequested, "test");
    switch (dice_.Below(15)) {
      case 0:
        return JournalEvent{};
      case 1:
        return CommitAskedEvent{};
      case 2:
        return AbortAskedEvent{asked,
                               dice_.Percent(50) ? AbortCause::kAsked : AbortCause::kGaveWay};
      case 3:
        return DeadlineEvent{static_cast<Phase>(1 + dice_.Below(7))};
      case 4:
        return DeadlineEvent{armed_};
      case 5:
        return ReportOf(5 + dice_.Below(2), dice_.Pick(All()));
      case 6:
      case 7:
      case 8:
        return Forged();
      case 9:
        if (append_waits_) return JournalEvent{Status(Code::kUnknown, Reason::kJournalFailed, "")};
        [[fallthrough]];
      case 10:
        if (spec_.quorum > 0) return GraceEvent{};
        [[fallthrough]];
      default:
        return ReportOf(dice_.Below(5), dice_.Pick(All()));
    }
  }

  /// A report that names a participant of the epoch with another incarnation, or a stranger.
  Event Forged() {
    Member m = dice_.Pick(All());
    if (dice_.Percent(80)) {
      m.incarnation.value += 1000;
    } else {
      m.id.value += 1000;
    }
    const Member original = dice_.Pick(All());
    Event event = ReportOf(dice_.Below(7), original);
    std::visit(
        [&](auto& e) {
          if constexpr (requires { e.member; }) e.member = m;
        },
        event);
    return event;
  }

  Event TakeFromInbox() {
    const size_t at = dice_.Below(inbox_.size());
    Event event = inbox_[at];
    const bool repeat = dice_.Percent(15);
    if (!repeat) inbox_.erase(inbox_.begin() + static_cast<std::ptrdiff_t>(at));
    if (!repeat && dice_.Percent(fault_percent_) && !inbox_.empty()) return TakeFromInbox();
    return event;
  }

  /// What a healthy world does next: pending answers, then the commit that was left to do by hand,
  /// then the deadline.
  Event FairEvent() {
    if (append_waits_) return JournalEvent{};
    if (!inbox_.empty()) {
      Event event = inbox_.front();
      inbox_.erase(inbox_.begin());
      return event;
    }
    if (state_.phase == Phase::kStaged) return CommitAskedEvent{};
    return DeadlineEvent{state_.phase};
  }

  // ---- the record ----
  void Record(const Event& event) {
    std::visit([&](const auto& e) { RecordOne(e); }, event);
  }
  void RecordOne(const PreparedEvent& e) {
    if (before_.phase == Phase::kPreparing && Known(e.member)) prepared_.insert(e.member);
  }
  void RecordOne(const SourceDoneEvent& e) {
    if (before_.phase == Phase::kTransferring && IsSource(e.member)) {
      sourced_.emplace(e.member, e.digests);
    }
  }
  void RecordOne(const StagedEvent& e) {
    if (before_.phase == Phase::kTransferring && EngineOf(e.member) != nullptr) {
      staged_.emplace(e.member, e.digests);
    }
  }
  void RecordOne(const SwappedEvent& e) {
    const EngineMembers* engine = EngineOf(e.member);
    if (engine != nullptr && engine->ranks[0] == e.member && commit_sent_.contains(engine->name)) {
      applied_.insert(engine->name);
    }
  }
  void RecordOne(const DrainedEvent& e) {
    if (before_.phase == Phase::kAborting && Known(e.member)) drained_.insert(e.member);
  }
  void RecordOne(const FailedEvent& e) {
    const EngineMembers* engine = EngineOf(e.member);
    if (engine == nullptr || Over()) return;
    const bool enough = before_.phase == Phase::kStaged ||
                        (spec_.quorum > 0 && spec_.engines.size() > spec_.quorum);
    if (enough && MayGoOnWithout({engine->name})) return RecordExclusion(*engine, ".failed");
    if (!submitted_) return;
    if (e.refused) {
      const bool asked = commit_sent_.contains(engine->name) && !applied_.contains(engine->name);
      if (!asked || Left(*engine) || e.member != engine->ranks[0]) return;
      refused_ = true;
      Reach("refused.leader");
    }
    failed_late_.insert(engine->name);
  }
  void RecordOne(const LostEvent& e) {
    if (!Known(e.member) || Over()) return;
    lost_.insert(e.member);
    const EngineMembers* engine = EngineOf(e.member);
    if (engine != nullptr && MayGoOnWithout({engine->name})) RecordExclusion(*engine, "");
  }
  bool MayGoOnWithout(const std::set<std::string>& names) const {
    const bool staged = before_.phase == Phase::kStaged;
    if (!staged && before_.phase != Phase::kPreparing && before_.phase != Phase::kTransferring) {
      return false;
    }
    size_t others = 0, readers = 0;
    for (const auto& other : spec_.engines) {
      if (names.contains(other.name)) continue;
      ++others;
      const auto parent = spec_.parents.find(other.name);
      readers += parent != spec_.parents.end() && names.contains(parent->second) ? 1 : 0;
    }
    if (staged) return others > 0;
    return others > 0 && others >= spec_.engines_min && spec_.drops_readers && readers == 0;
  }
  /// From now on its members are strangers.
  void RecordExclusion(EngineMembers engine, const std::string& how) {
    for (const Member& m : engine.ranks) {
      if (lost_.erase(m) == 0) to_abort_.insert(m);
      prepared_.erase(m);
      staged_.erase(m);
    }
    std::erase_if(spec_.engines, [&](const auto& e) { return e.name == engine.name; });
    Reach("excluded." + std::string(PhaseName(before_.phase)) + how);
    exclusions_.push_back(std::move(engine));
    excluded_now_ = true;
  }
  /// Those of which some rank is not in `done`, where the others are a quorum.
  template <typename Done>
  void RecordLate(const Done& done) {
    std::set<std::string> late;
    for (const auto& engine : spec_.engines) late.insert(engine.name);
    for (const std::string& name : Engines(done)) late.erase(name);
    const bool enough = spec_.quorum > 0 && spec_.engines.size() - late.size() >= spec_.quorum;
    if (late.empty() || !enough || !MayGoOnWithout(late)) return;
    for (const std::string& name : late) {
      const auto named = [&](const auto& engine) { return engine.name == name; };
      RecordExclusion(*std::ranges::find_if(spec_.engines, named), ".late");
    }
  }
  void RecordOne(const JournalEvent& e) {
    if (!append_waits_) return;
    append_waits_ = false;
    (e.why.ok() ? durable_ : stopped_expected_) = true;
  }
  void RecordOne(const CommitAskedEvent&) {
    if (before_.phase == Phase::kStaged) commit_asked_ = true;
  }
  void RecordOne(const AbortAskedEvent&) {}
  void RecordOne(const GraceEvent&) {
    if (grace_ && before_.phase == Phase::kTransferring) RecordLate(staged_);
  }
  void RecordOne(const DeadlineEvent& e) {
    if (e.phase == before_.phase && e.phase == Phase::kTransferring) RecordLate(staged_);
    const bool sources =
        std::ranges::all_of(spec_.sources, [&](const Member& m) { return prepared_.contains(m); });
    if (e.phase == before_.phase && e.phase == Phase::kPreparing && sources) RecordLate(prepared_);
    if (e.phase == Phase::kAborting && before_.phase == Phase::kAborting) {
      for (const Member& m : All()) {
        if (!drained_.contains(m)) lost_.insert(m);
      }
      Reach("deadline.aborting");
    }
    if (e.phase == Phase::kCommitting && before_.phase == Phase::kCommitting) late_ = true;
  }

  /// Every byte was reported on both sides, and equal.
  bool TrulyStaged() const {
    if (sourced_.size() != spec_.sources.size() || staged_.size() != Targets().size()) return false;
    std::map<std::pair<PlanId, uint32_t>, uint64_t> sent;
    for (const auto& [m, digests] : sourced_) {
      for (const Digest& d : digests) sent[{d.plan, d.stream}] = d.digest;
    }
    for (const auto& engine : spec_.engines) {
      for (const Member& m : engine.ranks) {
        if (staged_.at(m).size() != spec_.sources.size()) return false;
        for (const Digest& d : staged_.at(m)) {
          const auto it = sent.find({d.plan, d.stream});
          if (it == sent.end() || it->second != d.digest) return false;
        }
      }
    }
    return true;
  }

  /// Engines of which every rank is in `done`.
  template <typename Done>
  std::set<std::string> Engines(const Done& done) const {
    std::set<std::string> names;
    for (const auto& engine : spec_.engines) {
      if (std::all_of(engine.ranks.begin(), engine.ranks.end(),
                      [&](const Member& m) { return done.contains(m); })) {
        names.insert(engine.name);
      }
    }
    return names;
  }

  // ---- judging ----
  void Deliver(const Event& event) {
    ++result_.steps;
    before_ = state_;
    const bool over = Over();
    const bool known = NamesAMember(event);
    excluded_now_ = armed_now_ = false;
    Record(event);
    Outcome outcome = step_(state_, event);
    state_ = outcome.state;
    JudgeRefusal(known, outcome, over);
    JudgePhase();
    FindStragglers(event);
    Absorb(outcome.actions);
    JudgeWhatMayFollow(event);
    JudgeProgress(event);
    if (std::holds_alternative<GraceEvent>(event) && before_.phase == Phase::kTransferring) {
      grace_ = false;
    }
  }

  bool NamesAMember(const Event& event) const {
    return std::visit(
        [this](const auto& e) {
          if constexpr (requires { e.member; }) return Known(e.member);
          return true;
        },
        event);
  }

  void JudgeRefusal(bool known, const Outcome& outcome, bool over) {
    const bool quiet = outcome.actions.empty() && outcome.state == before_;
    if (over) Require(quiet, "an epoch that is over changes nothing");
    if (!known) {
      Reach("forged");
      Require(quiet, "I7/I12: a stranger or stale incarnation changes nothing");
    }
    Require(outcome.state.spec == spec_,
            "the required members are frozen, but for engines that are lost or late before the "
            "decision and that nobody needs");
  }

  void JudgePhase() {
    using P = Phase;
    if (before_.phase == state_.phase) return;
    static const std::set<std::pair<P, P>> kAllowed = {
        {P::kPreparing, P::kTransferring},  {P::kPreparing, P::kAborting},
        {P::kPreparing, P::kAborted},       {P::kTransferring, P::kStaged},
        {P::kTransferring, P::kCommitting}, {P::kTransferring, P::kAborting},
        {P::kTransferring, P::kAborted},    {P::kStaged, P::kCommitting},
        {P::kStaged, P::kAborting},         {P::kStaged, P::kAborted},
        {P::kCommitting, P::kCommitted},    {P::kAborting, P::kAborted}};
    Require(kAllowed.contains({before_.phase, state_.phase}), "a phase that cannot follow");
    Reach(std::string(PhaseName(before_.phase)) + "->" + std::string(PhaseName(state_.phase)));
  }

  /// Who is named is late or failed; who is not has done its part, and is a quorum.
  void FindStragglers(const Event& event) {
    const bool preparing = before_.phase == Phase::kPreparing;
    if (!preparing && before_.phase != Phase::kTransferring) {
      return Require(state_.stragglers == before_.stragglers,
                     "stragglers are named by the abort only");
    }
    const auto* failed = std::get_if<FailedEvent>(&event);
    const auto* deadline = std::get_if<DeadlineEvent>(&event);
    const bool late = (std::holds_alternative<GraceEvent>(event) && grace_) ||
                      (deadline != nullptr && deadline->phase == before_.phase);
    std::set<std::string> expected;
    if (failed != nullptr && EngineOf(failed->member) != nullptr) {  // and was not excluded
      expected = {EngineOf(failed->member)->name};
    }
    if (late) {
      const auto done = preparing ? Engines(prepared_) : Engines(staged_);
      for (const auto& engine : spec_.engines) {
        if (!done.contains(engine.name)) expected.insert(engine.name);
      }
      for (const Member& m : spec_.sources) {
        if (preparing && !prepared_.contains(m))
          return Require(state_.stragglers.empty(), "a source");
      }
    }
    const bool enough = spec_.quorum > 0 && spec_.engines.size() - expected.size() >= spec_.quorum;
    if (!enough || state_.phase == before_.phase) expected.clear();
    Require(state_.stragglers == expected,
            "stragglers are the engines that alone stopped the epoch, beside a quorum");
    if (!expected.empty()) Reach(failed != nullptr ? "stragglers.failed" : "stragglers.late");
  }

  /// What the state says of an epoch that is over decides whether it is tried again.
  void JudgeWhatMayFollow(const Event& event) {
    Require(state_.released == released_, "it knows whether the sources were released");
    Require(state_.refused == refused_, "a refusal counts from a leader that was asked, only");
    const bool aborted = state_.phase == Phase::kAborting || state_.phase == Phase::kAborted;
    Require(aborted == (state_.cause != AbortCause::kNone), "an abort has a cause");
    if (!aborted) return;
    if (before_.cause != AbortCause::kNone) {
      return Require(state_.cause == before_.cause, "and keeps it");
    }
    AbortCause expected = AbortCause::kFault;
    if (const auto* asked = std::get_if<AbortAskedEvent>(&event)) expected = asked->cause;
    // (Without the late ones it may be the digests of the others that end it.)
    const bool late = std::holds_alternative<DeadlineEvent>(event) && !excluded_now_;
    if (late) expected = AbortCause::kDeadline;
    Require(state_.cause == expected, "the cause is what ended it");
  }

  void Absorb(const std::vector<Action>& actions) {
    for (size_t i = 0; i < actions.size(); ++i) {
      Require(!Over(), "nothing follows Finish or Halt");
      std::visit([&](const auto& a) { AbsorbOne(a); }, actions[i]);
    }
    Require(exclusions_.empty() && to_abort_.empty(),
            "sources learn of an engine that is excluded, and its living ranks are told to abort");
    if (entered_abort_) {
      for (const Member& m : All()) {
        Require(lost_.contains(m) || aborts_.contains(m), "every live member is told of the abort");
      }
    }
  }
  void AbsorbOne(const SendPrepare&) {
    for (const Member& m : All()) inbox_.push_back(PreparedEvent{m});
  }
  void AbsorbOne(const SendTransfer&) {
    Require(prepared_.size() == All().size(), "TRANSFERRING only when every member prepared");
    Require(!transfer_sent_, "SendTransfer once");
    transfer_sent_ = true;
    for (const Member& m : spec_.sources) inbox_.push_back(ReportOf(1, m));
    for (const Member& m : Targets()) inbox_.push_back(ReportOf(2, m));
  }
  void AbsorbOne(const SendRelease&) {
    Require(TrulyStaged(), "I9: release only when every byte is staged and verified");
    Require(!released_, "SendRelease once");
    released_ = true;
  }
  void AbsorbOne(const AppendCommit&) {
    Require(Published(), "a fill never appends");
    Require(!submitted_, "AppendCommit at most once");
    Require(!entered_abort_, "I3: no COMMIT after an abort");
    Require(TrulyStaged(), "I6: COMMIT only when all required members staged and verified");
    Require(!spec_.manual_commit || commit_asked_, "a manual commit waits for Commit()");
    Require(released_, "sources are released on entering STAGED");
    submitted_ = append_waits_ = true;
  }
  void AbsorbOne(const SendCommit& a) {
    Require(Published() ? durable_ : TrulyStaged(), "I2: SendCommit only after the durable append");
    Require(!entered_abort_, "I3: no commit after an abort");
    Require(!evicted_.contains(a.engine), "an evicted engine is not told to swap");
    Require(commit_sent_.insert(a.engine).second, "SendCommit once for each engine");
    submitted_ = true;
    if (Published()) Reach("commit.sent");
    for (const auto& engine : spec_.engines) {
      if (engine.name != a.engine) continue;
      if (dice_.Percent(10)) inbox_.push_back(SwappedEvent{engine.ranks.back()});
      inbox_.push_back(SwappedEvent{engine.ranks[0]});
    }
  }
  void AbsorbOne(const SendCommittedEverywhere& a) {
    Require(applied_.contains(a.engine), "INSTALLED only after the leader applied");
    Require(installed_.insert(a.engine).second, "INSTALLED once");
  }
  void AbsorbOne(const ExcludeEngine& a) {
    const auto known = std::ranges::find(exclusions_, a.engine);
    Require(known != exclusions_.end() && !a.why.ok(),
            "only who is lost, fails or is late is excluded");
    Require(!entered_abort_ && !submitted_, "nobody is excluded after a decision");
    if (known != exclusions_.end()) exclusions_.erase(known);
  }
  void AbsorbOne(const SendAbort& a) {
    if (to_abort_.erase(a.member) > 0) return inbox_.push_back(DrainedEvent{a.member});
    Require(!submitted_, "I3: no abort once COMMIT is submitted");
    Require(Known(a.member) && !lost_.contains(a.member), "aborts go to live members");
    Require(aborts_.insert(a.member).second, "one abort for each member");
    Require(!state_.why.ok() && a.why == state_.why, "an abort says why");
    entered_abort_ = true;
    Reach("abort." + std::string(ReasonName(a.why.reason())));
    inbox_.push_back(DrainedEvent{a.member});
  }
  void AbsorbOne(const EvictEngine& a) {
    const bool aborting = entered_abort_ && !submitted_;
    const auto engine = std::find_if(spec_.engines.begin(), spec_.engines.end(),
                                     [&](const auto& e) { return e.name == a.engine; });
    Require(engine != spec_.engines.end(), "an engine of the epoch is evicted");
    if (!broken_.empty()) return;
    const bool lost_rank = LostRank(*engine);
    Require(aborting || !lost_rank, "a loss alone evicts nobody");
    Require(aborting || failed_late_.contains(a.engine),
            "an engine is evicted only when it failed");
    Require(evicted_.insert(a.engine).second, "evicted once");
    Reach(aborting ? "evict.aborting" : "evict.failed");
  }
  void AbsorbOne(const MarkStale& a) {
    Require(late_ && durable_or_fill() && !installed_.contains(a.engine),
            "an engine is left behind only when it has not swapped in time");
    Require(evicted_.insert(a.engine).second, "left behind once, and not evicted");
    Reach("behind");
  }
  void AbsorbOne(const EvictSource& a) {
    Require(entered_abort_ && IsSource(a.member), "only a source that did not drain is evicted");
    Reach("evict.source");
  }
  void AbsorbOne(const Finish& a) {
    Require(a.phase == state_.phase, "Finish names the phase");
    if (a.phase == Phase::kAborted) {
      for (const Member& m : All()) {
        Require(drained_.contains(m) || lost_.contains(m), "ABORTED only when all drained");
      }
      Require(!a.why.ok(), "an abort says why");
    } else {
      Require(durable_or_fill(), "I5: COMMITTED only when durable");
      for (const auto& engine : spec_.engines) {
        Require(installed_.contains(engine.name) || Left(engine),
                "COMMITTED when every engine applied or is not waited for");
      }
    }
    finished_ = true;
    const char* kinds[] = {"", ".fill", ".rollback"};
    Reach("finish." + std::string(PhaseName(a.phase)) + kinds[static_cast<int>(spec_.kind) - 1]);
  }
  void AbsorbOne(const Halt&) {
    Require(stopped_expected_, "Halt only when the journal failed");
    stopped_ = true;
    Reach("stop");
  }
  void AbsorbOne(const ArmGrace&) {
    const size_t staged = Engines(staged_).size();
    Require(spec_.quorum > 0 && staged >= spec_.quorum && staged < spec_.engines.size(),
            "a grace begins when a quorum of engines is staged, each counted once");
    Require(!grace_, "one grace at a time");
    grace_ = true;
    Reach("grace");
  }
  void AbsorbOne(const ArmDeadline& a) {
    Require(a.phase == state_.phase, "a deadline is armed for the phase just entered");
    armed_ = a.phase;
    armed_now_ = true;
  }

  bool durable_or_fill() const { return Published() ? durable_ : !commit_sent_.empty(); }

  /// What had to happen by now, given the record.
  void JudgeProgress(const Event& event) {
    const Phase phase = state_.phase;
    if (Over()) return;
    Require(phase != Phase::kCommitted && phase != Phase::kAborted, "an end is announced");
    Require(!stopped_expected_, "a failed append stops the deciding");
    if (phase == Phase::kPreparing) {
      Require(prepared_.size() < All().size(), "L2: all prepared, so transfer");
    }
    if (phase == Phase::kTransferring) {
      Require(sourced_.size() < spec_.sources.size() || staged_.size() < Targets().size(),
              "L2: all staged, so decide");
      const size_t staged = Engines(staged_).size();
      Require(
          grace_ || spec_.quorum == 0 || staged < spec_.quorum || staged == spec_.engines.size(),
          "L2: a quorum is staged, so the others have a grace");
      Require(!grace_ || staged < spec_.quorum || staged == spec_.engines.size() ||
                  !std::holds_alternative<GraceEvent>(event),
              "the grace ends the waiting");
    }
    const bool undecided =
        phase == Phase::kPreparing || phase == Phase::kTransferring || phase == Phase::kStaged;
    if (undecided) {
      Require(lost_.empty(), "a lost member aborts an undecided epoch");
      Require(!std::holds_alternative<AbortAskedEvent>(event), "an asked abort aborts");
      const auto* deadline = std::get_if<DeadlineEvent>(&event);
      const bool passed = deadline != nullptr && deadline->phase == before_.phase;
      Require(!passed || excluded_now_, "a deadline aborts, or excludes who is late");
      Require(!passed || armed_now_, "L2: what follows has a deadline");
    }
    if (phase == Phase::kStaged) Require(spec_.manual_commit, "only a manual commit waits");
    if (phase == Phase::kCommitting) JudgeCommitting();
    if (phase == Phase::kAborting) {
      bool waits = false;
      for (const Member& m : All()) waits |= !drained_.contains(m) && !lost_.contains(m);
      Require(waits, "L2: all drained, so aborted");
    }
  }
  bool LostRank(const EngineMembers& engine) const {
    return std::any_of(engine.ranks.begin(), engine.ranks.end(),
                       [&](const Member& m) { return lost_.contains(m); });
  }
  /// Nobody waits for its swap.
  bool Left(const EngineMembers& engine) const {
    return evicted_.contains(engine.name) || LostRank(engine);
  }
  void JudgeCommitting() {
    for (const auto& engine : spec_.engines) {
      if (!LostRank(engine)) continue;
      Require(installed_.contains(engine.name) || state_.evicted.contains(engine.name),
              "an engine with a lost rank is not waited for");
      Reach(installed_.contains(engine.name) ? "left.applied" : "left.lost");
    }
    if (durable_) {
      for (const auto& engine : spec_.engines) {
        Require(commit_sent_.contains(engine.name) || Left(engine), "a durable decision is sent");
      }
    }
  }

  const StepFn& step_;
  Dice dice_;
  Exploration& result_;
  uint64_t fault_percent_ = 0;
  bool corrupt_ = false;
  Spec spec_;
  State state_;
  State before_;
  std::string broken_;
  std::vector<Event> inbox_;
  Phase armed_ = Phase::kPreparing;

  std::set<Member> prepared_, drained_, lost_, aborts_;
  std::map<Member, std::vector<Digest>> sourced_, staged_;
  std::vector<EngineMembers> exclusions_;          ///< of this event, and not announced yet
  std::set<Member> to_abort_;                      ///< the living ranks of excluded engines
  bool excluded_now_ = false, armed_now_ = false;  ///< by this event
  std::set<std::string> applied_, installed_, evicted_, commit_sent_, failed_late_;
  bool transfer_sent_ = false, released_ = false, refused_ = false, submitted_ = false,
       append_waits_ = false;
  bool durable_ = false, commit_asked_ = false, entered_abort_ = false, late_ = false;
  bool finished_ = false, stopped_ = false, stopped_expected_ = false, grace_ = false;
};

}  // namespace

Exploration Explore(const StepFn& step, uint64_t first_seed, uint64_t seeds) {
  Exploration result;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    std::string broken = Run(step, seed, result).Play();
    if (broken.empty()) continue;
    result.violation = broken + " (WEIGHTWIRE_SEED=" + std::to_string(seed) + ")";
    result.seed = seed;
    return result;
  }
  return result;
}

}  // namespace weightwire::epoch::testing
