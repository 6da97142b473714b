#include "tests/unit/epoch/member_explorer.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/unit/epoch/dice.h"

namespace weightwire::epoch::testing {
namespace {

constexpr Member kSelf{ParticipantId(4), Incarnation(40)};
constexpr Member kOld{ParticipantId(4), Incarnation(39)};

class Life {
 public:
  Life(const MemberStepFn& step, uint64_t seed, MemberExploration& result)
      : step_(step), dice_(seed), result_(result) {
    chaos_percent_ = std::vector<uint64_t>{0, 4, 15, 40}[dice_.Below(4)];
    state_.self = self_;
  }

  /// The broken rule; empty when all held.
  std::string Play() {
    for (int i = 0; i < 90 && broken_.empty(); ++i) Deliver(Next());
    return broken_;
  }

 private:
  void Require(bool holds, const std::string& rule) {
    if (!holds && broken_.empty()) broken_ = rule;
  }
  void Reach(const std::string& branch) { ++result_.reached[branch]; }

  // ---- the world ----
  MemberEvent Next() {
    // Between the loss of a coordinator and the next one nothing is said.
    if (orphaned_) return local_.empty() ? Adoption() : TakeLocal();
    if (!commands_.empty() && dice_.Percent(8)) return commands_.back();  // repeated
    if (dice_.Percent(chaos_percent_)) return Chaos();
    if (!local_.empty() && dice_.Percent(60)) return TakeLocal();
    return Protocol();
  }

  MemberEvent TakeLocal() {
    const size_t at = dice_.Below(local_.size());
    MemberEvent event = local_[at];
    local_.erase(local_.begin() + static_cast<std::ptrdiff_t>(at));
    return event;
  }

  MemberEvent Adoption() {
    orphaned_ = false;
    return LocalRejoined{Member{ParticipantId(self_.id.value + 1), self_.incarnation}};
  }

  PrepareCommand Prepare(Epoch epoch) {
    PrepareCommand command;
    command.epoch = epoch;
    command.member = self_;
    command.version = Version(epoch.value / 2 + 1);
    command.role = dice_.Percent(50) ? Role::kSource : Role::kTarget;
    const bool fill = dice_.Percent(25);
    command.kind = fill ? Kind::kFill : Kind::kPublish;
    command.content = fill && epoch.value > 1 ? Epoch(epoch.value - 1) : epoch;
    return command;
  }

  /// What a coordinator that keeps the rules says next.
  Command Protocol() {
    if (state_.phase == MemberPhase::kIdle || !plan_) {
      epoch_ = Epoch(epoch_.value + 1);
      plan_ = Prepare(epoch_);
      said_.clear();
      return *plan_;
    }
    const bool source = plan_->role == Role::kSource;
    const Version version = plan_->version;
    if (dice_.Percent(8)) return GiveUp();
    if (dice_.Percent(8)) return Exclude(epoch_, self_);
    if (said_.insert("transfer").second) return TransferCommand{epoch_, self_};
    if (source) {
      const Status why =
          dice_.Percent(80) ? OkStatus() : Status(Code::kAborted, Reason::kMemberLost, "");
      if (sent_transferred_.contains(epoch_)) {
        return ReleaseCommand{epoch_, version, self_, why};
      }
      return TransferCommand{epoch_, self_};
    }
    if (sent_swapped_.contains(epoch_) || (said_.contains("commit") && !leader_)) {
      return CommittedEverywhereCommand{epoch_, self_};
    }
    if (sent_transferred_.contains(epoch_)) {
      if (said_.insert("commit").second) leader_ = dice_.Percent(50);
      return CommitCommand{epoch_, version, plan_->content, self_, leader_};
    }
    return TransferCommand{epoch_, self_};
  }

  ExcludeCommand Exclude(Epoch epoch, Member member) {
    return {
        epoch, member, PlanId{1, 1}, {ParticipantId(static_cast<uint32_t>(9 + dice_.Below(3)))}};
  }

  /// The epoch is given up, or simply replaced by the next one.
  Command GiveUp() {
    const Epoch gone = epoch_;
    if (dice_.Percent(30)) {
      epoch_ = Epoch(epoch_.value + 1);
      plan_ = Prepare(epoch_);
      said_.clear();
      return *plan_;
    }
    return AbortCommand{gone, self_, Status(Code::kAborted, Reason::kAbortRequested, "")};
  }

  /// Anything, about any epoch near this one, perhaps to the incarnation before.
  MemberEvent Chaos() {
    const Epoch epoch(1 + epoch_.value + dice_.Below(4) - std::min<uint64_t>(epoch_.value, 3));
    const Member member = dice_.Percent(30) ? kOld : self_;
    const Status bad(Code::kUnavailable, Reason::kTransportFailed, "test");
    switch (dice_.Below(14)) {
      case 0:
      case 1: {
        PrepareCommand command = Prepare(epoch);
        command.member = member;
        if (dice_.Percent(20)) command.content = Epoch(1);
        if (member == self_ && dice_.Percent(50)) epoch_ = std::max(epoch_, epoch);
        return Command(command);
      }
      case 2:
        return Command(TransferCommand{epoch, member});
      case 3:
        return Command(CommitCommand{epoch, Version(1), epoch, member, dice_.Percent(50)});
      case 4:
        return Command(CommittedEverywhereCommand{epoch, member});
      case 5:
        return Command(AbortCommand{epoch, member, bad});
      case 6:
        return Command(ReleaseCommand{epoch, Version(epoch.value / 2 + 1), member,
                                      dice_.Percent(50) ? OkStatus() : bad});
      case 7:
        if (dice_.Percent(30)) return Command(StaleCommand{epoch, member});
        if (dice_.Percent(30)) return Command(Exclude(epoch, member));
        if (member == kOld || dice_.Percent(15)) return Command(EvictCommand{member, bad});
        return LocalSwapped{epoch};
      case 8:
        return LocalPrepared{epoch, dice_.Percent(50) ? OkStatus() : bad};
      case 9:
        return LocalTransferred{epoch, dice_.Percent(50) ? OkStatus() : bad};
      case 10:
        return LocalSwapped{epoch};
      case 11:
        if (dice_.Percent(10)) return LocalLost{bad};
        if (dice_.Percent(10)) return LocalEmptied{};
        if (dice_.Percent(30)) {
          orphaned_ = true;
          return LocalCutOff{};
        }
        return LocalSwapped{epoch_};
      default:
        return Command(AbortCommand{std::max(epoch_, Epoch(1)), member, bad});
    }
  }

  // ---- the record ----
  /// Local work reports only what was really begun; chaos reports something else now and then,
  /// which counts only where it cannot be told from the truth.
  void Record(const MemberEvent& event) {
    if (const auto* command = std::get_if<Command>(&event)) {
      commands_.push_back(event);
      std::visit([&](const auto& c) { RecordCommand(c); }, *command);
    }
    if (const auto* e = std::get_if<LocalPrepared>(&event)) {
      if (e->epoch == active_ && e->why.ok()) prepared_.insert(e->epoch);
    }
    if (const auto* e = std::get_if<LocalTransferred>(&event)) {
      if (e->epoch == active_ && e->why.ok() && transfers_.contains(e->epoch)) {
        transferred_.insert(e->epoch);
      }
    }
    if (const auto* e = std::get_if<LocalSwapped>(&event)) {
      if (e->epoch == active_ && leads_) applied_.insert(e->epoch);
    }
    if (const auto* e = std::get_if<LocalDrained>(&event)) {
      if (e->epoch == draining_) draining_ = Epoch{};
    }
    if (const auto* e = std::get_if<LocalRejoined>(&event); e && !ended_) self_ = e->self;
    if (std::holds_alternative<LocalCutOff>(event)) owes_drained_ = Epoch{};
  }
  void RecordCommand(const PrepareCommand& c) {
    if (c.member == self_ && !ended_) told_prepare_.insert(c.epoch);
  }
  void RecordCommand(const TransferCommand& c) {
    if (c.member == self_) told_transfer_.insert(c.epoch);
  }
  void RecordCommand(const ReleaseCommand&) {}
  void RecordCommand(const CommitCommand& c) {
    if (c.member == self_) told_commit_.insert(c.epoch);
  }
  void RecordCommand(const CommittedEverywhereCommand& c) {
    if (c.member == self_) told_installed_.insert(c.epoch);
  }
  void RecordCommand(const AbortCommand& c) {
    if (c.member == self_) told_abort_.insert(c.epoch);
  }
  void RecordCommand(const EvictCommand&) {}
  void RecordCommand(const HashCommand&) {}
  void RecordCommand(const ExcludeCommand& c) {
    if (c.member != self_ || ended_ || CurrentEpoch() != c.epoch) return;
    told_exclude_[c.epoch].insert(c.readers.front());
  }
  void RecordCommand(const StaleCommand& c) {
    if (c.member == self_ && !ended_) behind_ = std::max(behind_, c.committed);
  }

  // ---- judging ----
  void Deliver(const MemberEvent& event) {
    ++result_.steps;
    before_ = state_;
    const bool repeated = std::holds_alternative<Command>(event) && !commands_.empty() && last_ &&
                          std::get<Command>(*last_) == std::get<Command>(event);
    last_.reset();
    if (std::holds_alternative<Command>(event)) last_ = event;
    Record(event);
    MemberOutcome outcome = step_(state_, event);
    state_ = outcome.state;
    event_ = &event;
    for (const MemberAction& action : outcome.actions) {
      std::visit([&](const auto& a) { Judge(a); }, action);
      if (repeated) {
        Reach("repeated");
        Require(IsAnswer(action), "a repeated command has no other effect than its answer");
      }
      Require(!was_ended_ || IsRefusal(action), "after the end there are only refusals");
    }
    JudgeStrangers(event, outcome);
    if (std::holds_alternative<LocalCutOff>(event) && !was_ended_) JudgeOrphan();
    JudgeAnswers(event, outcome);
    JudgeState();
    was_ended_ = ended_;
  }

  static bool IsAnswer(const MemberAction& a) {
    return std::holds_alternative<SendPrepared>(a) || std::holds_alternative<SendTransferred>(a) ||
           std::holds_alternative<SendSwapped>(a) || std::holds_alternative<SendDrained>(a) ||
           std::holds_alternative<SendFailed>(a);
  }
  static bool IsRefusal(const MemberAction& a) {
    const auto* failed = std::get_if<SendFailed>(&a);
    return failed != nullptr && failed->why.reason() == Reason::kStaleIncarnation;
  }

  void JudgeStrangers(const MemberEvent& event, const MemberOutcome& outcome) {
    const auto* command = std::get_if<Command>(&event);
    if (command == nullptr) return;
    const Member member = std::visit([](const auto& c) { return c.member; }, *command);
    if (member == self_ && !before_.evicted) return;
    Reach(member == self_ ? "ended" : "stranger");
    Require(outcome.state == before_, "I7/I12: a command to another incarnation changes nothing");
    for (const MemberAction& a : outcome.actions) {
      Require(IsRefusal(a), "another incarnation is refused");
    }
    const bool waits = std::holds_alternative<PrepareCommand>(*command) ||
                       std::holds_alternative<TransferCommand>(*command) ||
                       std::holds_alternative<CommitCommand>(*command) ||
                       std::holds_alternative<AbortCommand>(*command);
    Require(outcome.actions.size() == (waits ? 1u : 0u), "who waits is told");
  }

  /// What is whole stays; nothing goes on moving, and nothing waits to begin.
  void JudgeOrphan() {
    const bool staged = before_.phase == MemberPhase::kDone && role_ == Role::kTarget;
    if (staged || before_.phase == MemberPhase::kCommitting) {
      Require(state_ == before_, "what is staged outlives the coordinator");
      return Reach(staged ? "orphan.staged" : "orphan.committing");
    }
    const bool quiet = state_.phase == MemberPhase::kIdle || state_.phase == MemberPhase::kDraining;
    Require(quiet && !state_.current, "what moves ends with the coordinator");
    Require(!state_.tell_drained, "nobody is told of a drain");
    Reach(state_.phase == before_.phase ? "orphan.quiet" : "orphan.stopped");
  }

  /// L2: what must have happened, given the record.
  void JudgeAnswers(const MemberEvent& event, const MemberOutcome& outcome) {
    if (before_.evicted) return;
    const bool answered = !outcome.actions.empty();
    if (const auto* command = std::get_if<Command>(&event)) {
      if (const auto* c = std::get_if<AbortCommand>(command); c != nullptr && c->member == self_) {
        Require(answered || draining_ == c->epoch, "an abort is answered");
        if (c->epoch == draining_) owes_drained_ = c->epoch;
      }
      if (const auto* c = std::get_if<PrepareCommand>(command); c && c->member == self_) {
        Require(answered || state_.current == *c, "a prepare is taken up or refused");
      }
    }
    if (const auto* e = std::get_if<LocalDrained>(&event)) {
      if (e->epoch == owes_drained_ && !ended_) {
        Require(told_drained_.contains(e->epoch), "an abort is answered when drained");
        owes_drained_ = Epoch{};
      }
      Require(!state_.current || ended_ || active_ == state_.current->epoch,
              "a prepare that waited for the drain goes on");
    }
  }

  void JudgeState() {
    Require(state_.fence >= before_.fence, "the fence only rises");
    if (active_ != Epoch{} && active_ == CurrentEpoch() && transfers_.contains(active_)) {
      Require(excluded_[active_] == told_exclude_[active_],
              "whoever is excluded is waited for no more, whenever it was said");
    }
    Require(state_.self == self_, "a member stays itself");
    const bool emptied = std::holds_alternative<LocalEmptied>(*event_);
    if (emptied) Reach("emptied");
    Require(!emptied || state_.serving == Epoch{}, "who gave up what it served serves nothing");
    if (!ended_ && !emptied) {
      Require(state_.serving >= before_.serving, "I4: serving never decreases");
    }
    Require(state_.behind == behind_, "behind what was committed without it, and that only rises");
    Require(state_.evicted == ended_, "evicted is for good");
    if (ended_) Require(state_.serving == Epoch{}, "an evicted member serves nothing");
    Require(state_.serving == before_.serving || installed_now_ || ended_ || emptied,
            "serving changes by installing or giving up only");
    installed_now_ = false;
  }

  Epoch CurrentEpoch() const { return state_.current ? state_.current->epoch : Epoch{}; }

  void Judge(const DoPrepare&) {
    const Epoch epoch = CurrentEpoch();
    Require(told_prepare_.contains(epoch), "prepares only what it was told");
    Require(active_ == Epoch{}, "an older epoch is drained before a new one begins");
    Require(draining_ == Epoch{}, "nothing begins while a drain is outstanding");
    Require(epoch > newest_, "epochs only rise");
    Require(!told_abort_.contains(epoch), "an epoch that was aborted first is fenced");
    newest_ = active_ = epoch;
    if (!state_.current) return;
    role_ = state_.current->role;
    Require(role_ == Role::kSource || state_.current->content >= before_.serving,
            "older content is not prepared");
    leads_ = false;
    local_.push_back(LocalPrepared{epoch, Maybe()});
    Reach(role_ == Role::kSource ? "prepare.source" : "prepare.target");
  }
  void Judge(const DoTransfer&) {
    const Epoch epoch = CurrentEpoch();
    Require(epoch == active_ && prepared_.contains(epoch), "transfers only what is prepared");
    Require(told_transfer_.contains(epoch), "transfers only when told");
    Require(transfers_.insert(epoch).second, "transfers once");
    local_.push_back(LocalTransferred{epoch, Maybe()});
    Reach("transfer");
  }
  void Judge(const DoExclude& a) {
    const Epoch epoch = CurrentEpoch();
    Require(epoch == active_ && transfers_.contains(epoch), "nobody is excluded before it moves");
    Require(told_exclude_[epoch].contains(a.readers.front()), "excludes only who it was told");
    Require(excluded_[epoch].insert(a.readers.front()).second, "excludes once");
    const bool before = std::holds_alternative<TransferCommand>(std::get<Command>(*event_));
    Reach(before ? "exclude.before" : "exclude.moving");
  }
  void Judge(const DoDrain& a) {
    Require(a.epoch == active_, "drains what runs");
    Require(draining_ == Epoch{}, "one drain at a time");
    const bool ending = std::holds_alternative<LocalLost>(*event_) || state_.evicted;
    Require(!offered_.contains(a.epoch) || ending, "a committed epoch is drained only by eviction");
    draining_ = a.epoch;
    active_ = Epoch{};
    local_.push_back(LocalDrained{a.epoch});
    Reach("drain");
    if (std::holds_alternative<Command>(*event_) &&
        std::holds_alternative<PrepareCommand>(std::get<Command>(*event_))) {
      Reach("drain.superseded");
    }
  }
  void Judge(const OfferSwap& a) {
    const Epoch epoch = CurrentEpoch();
    Require(role_ == Role::kTarget, "only a target swaps");
    Require(epoch == active_ && transferred_.contains(epoch), "I6: swaps only what is staged");
    Require(told_commit_.contains(epoch), "I2: swaps only on COMMIT");
    Require(offered_.insert(epoch).second, "offers once");
    leads_ = a.leader;
    if (a.leader) local_.push_back(LocalSwapped{epoch});
    Reach(a.leader ? "offer.leader" : "offer.rank");
  }
  void Judge(const DoInstall&) {
    Require(offered_.contains(active_), "installs only what was offered");
    Require(told_installed_.contains(active_), "installs only when the engine has");
    Require(!leads_ || applied_.contains(active_), "the leader installs after it applied");
    Require(before_.current && state_.serving == before_.current->content,
            "serves the content that was committed");
    installed_now_ = true;
    active_ = Epoch{};
    Reach("install");
  }
  void Judge(const TellReleased& a) {
    Require(released_.insert(a.version).second, "a version is released once");
    if (a.why.ok() && a.epoch == active_) {
      Require(transferred_.contains(a.epoch) && role_ == Role::kSource,
              "I9: released only when the bytes are sent");
      Reach("released");
      return;
    }
    Require(a.epoch != active_ && a.epoch != draining_,
            "I9: given up only when nothing reads the bytes any more");
    Reach(a.why.ok() ? "released.again" : "released.given_up");
  }
  void Judge(const TellEvicted&) {
    Require(!ended_, "evicted once");
    ended_ = true;
    Reach(active_ == Epoch{} ? "evicted.idle" : "evicted.active");
  }
  void Judge(const SendLost&) {
    Require(!ended_, "lost once");
    ended_ = true;
    Reach("lost");
  }
  void Judge(const SendPrepared&) {
    Require(prepared_.contains(active_) && CurrentEpoch() == active_, "I7: PREPARED is true");
  }
  void Judge(const SendTransferred&) {
    Require(transferred_.contains(active_) && CurrentEpoch() == active_, "I6: STAGED is true");
    sent_transferred_.insert(active_);
  }
  void Judge(const SendSwapped&) {
    Require(applied_.contains(active_) && leads_, "APPLIED is true and the leader's");
    sent_swapped_.insert(active_);
  }
  void Judge(const SendDrained& a) {
    Require(a.epoch != active_ && a.epoch != draining_, "DRAINED is true");
    Require(told_abort_.contains(a.epoch), "DRAINED answers an abort");
    told_drained_.insert(a.epoch);
    Reach("drained");
  }
  void Judge(const SendFailed& a) {
    Require(!a.why.ok(), "a failure says why");
    Reach("failed." + std::string(ReasonName(a.why.reason())));
    if (std::holds_alternative<Command>(*event_)) {
      Require(state_ == before_, "a refused command changes nothing");
      const Command& command = std::get<Command>(*event_);
      if (std::holds_alternative<AbortCommand>(command) && !before_.evicted &&
          a.why.reason() == Reason::kStaleEpoch) {
        Reach("abort.refused");
      }
    }
  }

  Status Maybe() {
    if (!dice_.Percent(chaos_percent_ / 2)) return OkStatus();
    return Status(Code::kUnavailable, Reason::kTransportFailed, "test");
  }

  const MemberStepFn& step_;
  Dice dice_;
  MemberExploration& result_;
  uint64_t chaos_percent_ = 0;
  MemberState state_, before_;
  std::string broken_;
  const MemberEvent* event_ = nullptr;
  std::optional<MemberEvent> last_;

  Epoch epoch_{};
  std::optional<PrepareCommand> plan_;
  Epoch behind_{};
  std::set<std::string> said_;
  bool leader_ = false;
  std::vector<MemberEvent> commands_, local_;
  bool orphaned_ = false;
  Member self_ = kSelf;

  Epoch active_{}, draining_{}, newest_{}, owes_drained_{};
  Role role_ = Role::kTarget;
  bool leads_ = false, ended_ = false, was_ended_ = false, installed_now_ = false;
  std::set<Epoch> told_prepare_, told_transfer_, told_commit_, told_installed_, told_abort_,
      told_drained_, prepared_, transfers_, transferred_, offered_, applied_, sent_transferred_,
      sent_swapped_;
  std::set<Version> released_;
  std::map<Epoch, std::set<ParticipantId>> told_exclude_, excluded_;
};

}  // namespace

MemberExploration ExploreMember(const MemberStepFn& step, uint64_t first_seed, uint64_t seeds) {
  MemberExploration result;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    std::string broken = Life(step, seed, result).Play();
    if (broken.empty()) continue;
    result.violation = broken + " (WEIGHTWIRE_SEED=" + std::to_string(seed) + ")";
    result.seed = seed;
    return result;
  }
  return result;
}

}  // namespace weightwire::epoch::testing
