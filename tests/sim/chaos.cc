#include "tests/sim/chaos.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weightwire::sim {

using std::chrono::milliseconds;
using std::chrono::seconds;

Chaos::Chaos(uint64_t seed, Reached& reached)
    : random_(seed * 7919 + 1),
      withdraws_(seed % 4 == 1),
      fleet_(OptionsFor(seed)),
      reached_(reached),
      goes_back_(seed % 4 == 2),
      two_models_(OfTwoModels(seed)) {
  if (seed % 4 == 0) drains_.emplace(fleet_, reached_);
}

Fleet::Options Chaos::OptionsFor(uint64_t seed) {
  Fleet::Options options;
  std::mt19937_64 random(seed);
  options.seed = seed;
  options.message_delay_max = milliseconds(random() % 30);
  options.journal_delay = milliseconds(random() % 40);
  options.repeat_reports = true;
  options.link.latency = std::chrono::microseconds(random() % 2000);
  options.link.get_jitter_max = std::chrono::microseconds(random() % 3000);
  using DeltaMode = transfer::DeltaPolicy::Mode;
  options.delta.mode = seed % 3 == 0   ? DeltaMode::kOff
                       : seed % 3 == 1 ? DeltaMode::kAuto
                                       : DeltaMode::kAlways;
  // A code has a head of 32 bytes: only of whole tensors it is shorter than they are.
  if (options.delta.mode == DeltaMode::kAlways) options.tuning.segment_bytes_max = 160;
  options.tuning.get_timeout = seconds(2);
  options.tuning.progress_timeout = seconds(3);
  options.tuning.connect_timeout = seconds(1);
  options.tuning.drain_grace = seconds(1);
  if (random() % 2 == 0) options.trainer = MegatronTp2();
  switch (random() % 4) {
    case 0:  // all of them
      break;
    case 1:  // three of one layout, which pass versions on to each other
      options.engines = {{"one", VllmTp1(), {"rollout-a"}},
                         {"one-b", VllmTp1(), {"rollout-b"}},
                         {"one-c", VllmTp1(), {"rollout-c"}}};
      options.coordinator.fanout =
          seed / 4 % 2 == 0 ? coordinator::Fanout::kChain : coordinator::Fanout::kTree;
      break;
    case 2:
      options.engines.erase(options.engines.begin());
      break;
    default:
      options.engines.resize(1 + random() % 2);
  }
  if (random() % 2 == 0) {
    const auto kind = static_cast<coordinator::CommitPolicy::Kind>(1 + random() % 3);
    const auto quorum = static_cast<uint32_t>(1 + random() % options.engines.size());
    options.coordinator.commit_policy = {kind, quorum, milliseconds(random() % 2000)};
  }
  for (auto& engine : options.engines) {
    engine.buffers = 1 + static_cast<uint32_t>(random() % 4);
  }
  if (OfTwoModels(seed)) {  // and engines of one or the other
    options.trainer = TwoModels(options.trainer, MegatronTp2());
    for (size_t i = 0; i < options.engines.size(); ++i) {
      auto& party = options.engines[i].party;
      party = EngineOf(i % 2 == 0 ? "actor" : "reward", party);
    }
  }
  return options;
}

Node& Chaos::AnyNode() {
  return *fleet_.nodes()[static_cast<size_t>(In(0, std::ssize(fleet_.nodes()) - 1))];
}

Rollout& Chaos::AnyEngine() {
  return *fleet_.engines()[static_cast<size_t>(In(0, std::ssize(fleet_.engines()) - 1))];
}

void Chaos::Run() {
  ASSERT_TRUE(fleet_.Start());
  for (auto& engine : fleet_.engines()) {
    engine->refuses = [this] { return !settling_ && In(0, 49) == 0; };
  }
  // Few more often than many: a second fault meets the first one's traces, an eighth little new.
  const int64_t rounds = std::min(In(1, 8), In(1, 8));
  for (int64_t round = 0; round < rounds && !::testing::Test::HasFatalFailure(); ++round) Round();
  settling_ = true;
  Heal();
  Settle();
  CountEpochs();
  reached_.Count("trainer evictions", fleet_.trainer().evictions());
  reached_.Count("ranks that read from another engine", fleet_.relayed());
  reached_.Count("ranks that dropped a reader", fleet_.excluded());
  reached_.Count("versions taken back because an engine refused them", fleet_.taken_back());
  reached_.Count("engines that outlived a coordinator", fleet_.recalled());
  reached_.Count("engines that did not fit the next coordinator's journal", fleet_.refused());
  auto withdrawals = fleet_.trainer().withdrawals();
  reached_.Count("versions that a publisher withdrew", withdrawals[agent::Withdrawal::kRevoked]);
  reached_.Count("versions withdrawn when they were read", withdrawals[agent::Withdrawal::kRead]);
  reached_.Count("versions committed of a later lineage", fleet_.ledger.of_later_lineages());
  for (const auto& engine : fleet_.engines()) {
    reached_.Count("ends of engines", engine->lives() - 1);
    reached_.Count("buffers given up for the next version", engine->rooms());
  }
}

void Chaos::Round() {
  if (In(0, 1) == 0) GoBack();
  // A cut that nothing follows is a case of its own: no publish makes anything right.
  if (In(0, 3) != 0 && fleet_.coordinator() != nullptr && fleet_.trainer().Idle()) {
    reached_.Count("versions not moved", !fleet_.trainer().outcome().ok());
    Publish();
  }
  fleet_.RunFor(Up(milliseconds(120)));
  if (withdraws_) Withdraw();
  if (drains_ && In(0, 1) == 0) DrainOrUndo();
  if (In(0, 3) != 0) Strike();
  if (In(0, 1) == 0) {  // while the fleet deals with the first one
    fleet_.RunFor(Up(milliseconds(60)));
    Strike();
  }
  fleet_.RunFor(In(0, 2) == 0 ? Up(seconds(8)) : Up(milliseconds(400)));
  ExpectStatusIsTrue();
}

void Chaos::Publish() {
  const auto mode = In(0, 3) == 0 ? agent::PublishMode::kSnapshot : agent::PublishMode::kHold;
  if (goes_back_ && In(0, 1) == 0) {
    StartTrainerAnew();
    if (In(0, 1) == 0) {
      lineage_ = fleet_.ledger.newest_lineage() + 1;
      version_ = static_cast<uint64_t>(In(0, static_cast<int64_t>(version_)));
      reached_.Count("trainers that went back to an earlier step");
    } else if (lineage_ > coordinator::kFirstLineage && fleet_.trainer().Idle()) {
      reached_.Count("versions of trainers that were overtaken");
      fleet_.trainer().Publish(++version_max_, mode, seconds(20), lineage_ - 1);
      fleet_.RunFor(Up(milliseconds(400)));
      return StartTrainerAnew();
    }
  }
  if (!fleet_.trainer().Idle()) return;
  version_max_ = std::max(version_max_, ++version_);
  fleet_.trainer().Publish(version_, mode, seconds(20), lineage_);
}

/// While its last version may still be under way.
void Chaos::StartTrainerAnew() {
  fleet_.trainer().Restart();
  fleet_.RunUntil([this] { return fleet_.trainer().Idle(); }, seconds(2));
}

void Chaos::Withdraw() {
  for (int64_t times = In(0, 2); times > 0; --times) {
    fleet_.trainer().Withdraw(static_cast<uint32_t>(In(0, fleet_.trainer().size() - 1)),
                              In(0, 2) != 0, In(0, 1) == 0);
    fleet_.RunFor(Up(milliseconds(60)));
  }
}

void Chaos::ExpectStatusIsTrue() {
  if (drains_) drains_->ExpectServing();
  if (fleet_.coordinator() == nullptr) return;
  for (const auto& status : fleet_.coordinator()->Snapshot().engines) {
    const auto id = fleet_.ledger.CommittedAs(status.serving, status.version);
    EXPECT_TRUE(!id || id->lineage == status.lineage)
        << status.name << " serves " << coordinator::ToString(*id)
        << "; the coordinator takes it for one of lineage " << status.lineage;
    const auto& served = fleet_.engine(status.name).served();
    if (!served || status.serving <= served->content) continue;
    ADD_FAILURE() << status.name << " serves epoch " << served->content.value
                  << "; the coordinator takes it for " << status.serving.value;
  }
}

void Chaos::Strike() {
  switch (In(0, 11)) {
    case 10:
    case 11:
      return CutOff();
    case 0: {
      auto& engine = AnyEngine();
      return engine.KillRank(static_cast<uint32_t>(In(0, engine.size() - 1)));
    }
    case 1:
      return fleet_.trainer().KillRank(static_cast<uint32_t>(In(0, fleet_.trainer().size() - 1)));
    case 2:
      return KillNode();
    case 3:
      return AnyNode().port().Cut(In(0, 1) == 0);
    case 4:
      return AnyNode().port().Stall(Up(seconds(9)));
    case 5: {
      const std::string a = AnyNode().tcp_address(), b = AnyNode().tcp_address();
      return fleet_.network.Break(a, b);
    }
    case 6:
    case 7:
      return HurtLink();
    case 8:
      return CrashCoordinator();
    default:
      if (fleet_.coordinator() != nullptr) fleet_.journal.FailNext(In(0, 1) == 0);
      return;
  }
}

void Chaos::CutOff() {
  std::vector<Node*> nodes;
  const bool all = In(0, 1) == 0;
  for (Node* node : fleet_.Nodes()) {
    if (node->alive() && (all || In(0, 1) == 0)) nodes.push_back(node);
  }
  reached_.Count(all ? "cuts of all nodes" : "cuts of some nodes", !nodes.empty());
  reached_.Count("cuts in " + std::string(epoch::PhaseName(fleet_.coordinator() == nullptr
                                                               ? epoch::Phase::kAborted
                                                               : fleet_.NewestPhase())));
  fleet_.CutOff(nodes, In(0, 1) == 0, Up(seconds(9)));
}

void Chaos::GoBack() {
  if (fleet_.coordinator() == nullptr) return;
  Version version{version_ / 2};
  for (const auto& engine : fleet_.coordinator()->Snapshot().engines) {
    if (engine.held.empty() || In(0, 2) == 0) continue;
    version = engine.held[static_cast<size_t>(In(0, std::ssize(engine.held) - 1))].version;
  }
  fleet_.coordinator()->Rollback(version, [](const auto&) {});
  fleet_.RunFor(Up(milliseconds(30)));
  if (In(0, 1) == 0) Strike();
}

void Chaos::DrainOrUndo() {
  if (fleet_.coordinator() == nullptr) return;
  const auto& asked = drains_->asked();
  if (!asked.empty() && In(0, 2) == 0) {
    drains_->Undo(*std::next(asked.begin(), In(0, std::ssize(asked) - 1)));
  } else {
    drains_->Drain(In(0, 2) == 0 ? AnyNode().name() : AnyEngine().name());
  }
  if (In(0, 1) == 0) fleet_.RunUntil([this] { return drains_->answered(); }, seconds(1));
  if (In(0, 1) == 0) CrashCoordinator();
}

void Chaos::KillNode() {
  Node& node = AnyNode();
  if (!node.alive()) return;
  node.Kill(In(0, 1) == 0);
  fleet_.Later(Up(seconds(8)), [&node] {
    if (!node.alive()) node.Start();
  });
}

void Chaos::HurtLink() {
  transport::FakeLink link;
  link.latency = milliseconds(1);
  switch (In(0, 3)) {
    case 0:
      link.silent = true;
      break;
    case 1:
      link.drop_at_operation = static_cast<uint64_t>(In(1, 60));
      break;
    case 2:
      link.corrupt_every_get = static_cast<uint64_t>(In(1, 12));
      break;
    default:
      link.bytes_per_second = 2'000;
  }
  const std::string from = AnyNode().tcp_address(), to = AnyNode().tcp_address();
  fleet_.network.SetLink(from, to, link);
  fleet_.Later(Up(seconds(10)), [this, from, to] { fleet_.network.SetLink(from, to, {}); });
}

void Chaos::CountEpochs() {
  for (const auto& epoch : fleet_.coordinator()->Snapshot().epochs) reached_.Count(epoch);
}

void Chaos::CrashCoordinator() {
  if (fleet_.coordinator() == nullptr) return;
  // Half of the time while a record is under way, if one comes soon.
  if (In(0, 1) == 0) {
    fleet_.RunUntil([this] { return fleet_.journal.pending() > 0; }, seconds(1));
  }
  CountEpochs();
  reached_.Count("coordinator crashes");
  reached_.Count("coordinators crashed in " + std::string(epoch::PhaseName(fleet_.NewestPhase())));
  reached_.Count("coordinators crashed with somebody drained", drains_ && drains_->any());
  const size_t durable = fleet_.journal.durable().size();
  fleet_.CrashCoordinator();
  reached_.Count("records that only the crashed coordinator's disk knew",
                 fleet_.journal.durable().size() > durable);
  fleet_.Later(Up(seconds(4)), [this] {
    if (fleet_.coordinator() == nullptr) fleet_.StartCoordinator();
  });
}

void Chaos::Heal() {
  fleet_.journal.StopFailing();
  fleet_.RunFor(seconds(12));
  if (fleet_.coordinator() != nullptr && !fleet_.coordinator()->Snapshot().deciding) {
    reached_.Count("journal failures");
    CountEpochs();
    fleet_.CrashCoordinator();
    fleet_.StartCoordinator();
  }
  if (drains_ && !drains_->asked().empty()) drains_->UndoAll();
}

void Chaos::Settle() {
  Status status;
  for (int attempt = 0; attempt < 4 && !::testing::Test::HasFatalFailure(); ++attempt) {
    ASSERT_TRUE(fleet_.RunUntil([this] { return fleet_.trainer().Idle(); }, seconds(90)))
        << "the trainer never came back; "
        << (fleet_.coordinator() == nullptr ? "no coordinator"
                                            : fleet_.coordinator()->Snapshot().waiting_for)
        << fleet_.trainer().Describe();
    version_max_ = version_ = (goes_back_ ? version_max_ : version_) + 1;
    status = fleet_.Publish(version_, agent::PublishMode::kHold, seconds(30), lineage_);
    if (status.ok() && (!two_models_ || fleet_.AllServe(version_, seconds(60), lineage_))) break;
    // An engine of whose model there is no other one gets the next version.
    reached_.Count("engines that nobody could fill", status.ok());
    // A snapshot of a version that not every rank published is held until its deadline, 20 s.
    fleet_.RunFor(seconds(8));
  }
  ASSERT_TRUE(status.ok()) << status.ToString() << "\nwaits for "
                           << fleet_.coordinator()->Snapshot().waiting_for;
  if (fleet_.AllServe(version_, seconds(60), lineage_)) return;
  const coordinator::StatusSnapshot snapshot = fleet_.coordinator()->Snapshot();
  std::string engines;
  for (const auto& engine : snapshot.engines) {
    engines += "\n" + engine.name + ": " + std::string(EngineStateName(engine.state)) +
               ", version " + std::to_string(engine.version.value) + " " + engine.last_error;
  }
  ADD_FAILURE() << "version " << version_ << " is not served everywhere; waits for "
                << snapshot.waiting_for << engines;
}

}  // namespace weightwire::sim
