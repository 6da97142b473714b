#include "tests/sim/fleet.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "tests/sim/remembering_work.h"

namespace weightwire::sim {

transfer::Tuning Fleet::SmallTuning() {
  transfer::Tuning tuning;
  tuning.segment_bytes_max = 96;
  tuning.slot_bytes = 4096;
  tuning.slots_in_pool = 6;
  tuning.window = 2;
  tuning.mapped_window = 3;
  tuning.chunk_bytes = 256;
  tuning.gets_in_flight = 2;
  tuning.direct_run_bytes_min = 64;
  return tuning;
}

Fleet::Fleet(Options options)
    : random(options.seed),
      network(executor, executor, options.seed),
      journal(executor, options.journal_delay),
      options_(std::move(options)),
      surroundings_{executor,
                    random,
                    network,
                    [this] { return coordinator_.get(); },
                    [this](const std::string& address) { Disconnect(address); },
                    options_.tuning,
                    options_.delta} {
  network.SetDefaultLink(options_.link);
  journal.before_append = [this](const coordinator::JournalRecord& record) { OnAppend(record); };
  static const auto work = std::make_shared<const RememberingWork>();  // of all fleets
  options_.coordinator.work = work;
  options_.coordinator.random_ticket = [this] {
    Ticket ticket;
    for (uint8_t& byte : ticket) byte = static_cast<uint8_t>(random());
    return ticket;
  };
  for (const auto& [name, host] : options_.nodes) {
    nodes_.push_back(std::make_unique<Node>(surroundings_, name, host));
    nodes_.back()->port().SetDelay(options_.message_delay_max);
    if (options_.repeat_reports) nodes_.back()->port().RepeatReports();
    const Node* node = nodes_.back().get();
    nodes_.back()->port().on_command = [this, node](const epoch::Command& command) {
      OnCommand(*node, command);
    };
  }
  const auto at = [this](const std::vector<std::string>& names) {
    std::vector<Node*> found;
    for (const auto& name : names) found.push_back(&node(name));
    return found;
  };
  trainer_ = std::make_unique<Trainer>(executor, random, model, options_.trainer,
                                       at(options_.trainer_nodes));
  for (const EngineSpec& spec : options_.engines) {
    engines_.push_back(std::make_unique<Rollout>(executor, random, model, spec.name, spec.party,
                                                 at(spec.nodes), spec.buffers, ledger));
  }
}

Fleet::~Fleet() {
  closing_ = true;
  for (auto& engine : engines_) engine->SetRestart(false);
  trainer_->SetRestart(false);
  for (auto& one : nodes_) {
    if (one->alive()) one->Kill(false);
  }
  coordinator_.reset();
  WW_CHECK(executor.RunUntil(
      [this] {
        return std::ranges::all_of(nodes_, [](const auto& one) { return one->Reclaimed(); });
      },
      std::chrono::minutes(5)));
}

bool Fleet::Start() {
  StartCoordinator();
  for (auto& one : nodes_) one->Start();
  executor.RunFor(std::chrono::milliseconds(50));
  trainer_->Start();
  for (auto& engine : engines_) engine->Start();
  const auto ready = [this] {
    return trainer_->Idle() &&
           std::ranges::all_of(engines_, [](const auto& engine) { return engine->Ready(); });
  };
  const auto known = [this] {
    const auto status = coordinator_->Snapshot();
    return status.engines.size() == engines_.size() &&
           std::ranges::all_of(status.engines, [](const auto& engine) {
             return engine.state == coordinator::EngineState::kEmpty;
           });
  };
  return RunUntil(ready, std::chrono::seconds(30)) && RunUntil(known, std::chrono::seconds(30));
}

void Fleet::StartCoordinator() {
  floor_ = newest_;
  coordinator_ = coordinator::Coordinator::Make(options_.coordinator, executor, executor, executor,
                                                journal, counts_)
                     .value();
  coordinator::CommitRecord last;
  for (const auto& record : journal.durable()) {
    if (const auto* commit = std::get_if<coordinator::CommitRecord>(&record)) last = *commit;
  }
  const auto status = coordinator_->Snapshot();
  EXPECT_TRUE(status.committed == last.epoch && status.committed_version == last.version)
      << "a new coordinator takes epoch " << status.committed.value
      << " for committed, the journal says " << last.epoch.value;
}

void Fleet::CrashCoordinator() {
  journal.Crash(random() % (journal.pending() + 1));
  coordinator_.reset();
  // What is not durable now never will be: it may be aborted.
  std::erase_if(submitted_, [this](Epoch epoch) {
    return std::ranges::none_of(journal.durable(), [&](const auto& record) {
      const auto* commit = std::get_if<coordinator::CommitRecord>(&record);
      return commit != nullptr && commit->epoch == epoch;
    });
  });
  for (auto& one : nodes_) one->port().Cut(false);
}

void Fleet::CutOff(const std::vector<Node*>& nodes, bool coordinator_learns, Nanos span) {
  for (Node* node : nodes) {
    node->port().Refuse(span);
    node->port().Cut(coordinator_learns);
  }
}

std::vector<Node*> Fleet::Nodes() const {
  std::vector<Node*> all;
  for (const auto& one : nodes_) all.push_back(one.get());
  return all;
}

void Fleet::SetLinks(const transport::FakeLink& link) {
  for (const auto& from : nodes_) {
    for (const auto& to : nodes_) network.SetLink(from->tcp_address(), to->tcp_address(), link);
  }
}

bool Fleet::RunUntil(const std::function<bool()>& done, Nanos span) {
  const bool was_done = executor.RunUntil(
      [&] {
        engines_[steps_++ % engines_.size()]->CheckServedBytes();
        return done() || ::testing::Test::HasFatalFailure();
      },
      span);
  for (const auto& engine : engines_) engine->CheckServedBytes();
  return was_done;
}

void Fleet::RunFor(Nanos span) {
  const Nanos end = executor.Now() + span;
  RunUntil([] { return false; }, span);
  if (executor.Now() < end) executor.RunFor(end - executor.Now());
}

Status Fleet::Publish(uint64_t version, agent::PublishMode mode, Nanos deadline, uint64_t lineage) {
  trainer_->Publish(version, mode, deadline, lineage);
  if (!RunUntil([this] { return trainer_->Idle(); }, deadline + std::chrono::seconds(30))) {
    return Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded, "never released");
  }
  return trainer_->outcome();
}

bool Fleet::AllServe(uint64_t version, Nanos span, uint64_t lineage) {
  return RunUntil(
      [&] {
        return std::ranges::all_of(
            engines_, [&](const auto& engine) { return engine->Serves(version, lineage); });
      },
      span);
}

epoch::Phase Fleet::NewestPhase() const {
  for (const auto& epoch : coordinator_->Snapshot().epochs) {
    if (epoch.kind == epoch::Kind::kPublish) return epoch.phase;
  }
  return epoch::Phase::kAborted;
}

std::optional<Status> Fleet::Rollback(uint64_t version) {
  auto answer = std::make_shared<std::optional<Status>>();
  coordinator_->Rollback(Version{version}, [answer](const Result<coordinator::RolledBack>& r) {
    *answer = r ? OkStatus() : r.error();
  });
  RunUntil([&] { return answer->has_value(); }, std::chrono::seconds(60));
  return *answer;
}

bool Fleet::RunUntilPhase(epoch::Phase phase, Nanos span) {
  return RunUntil([&] { return NewestPhase() == phase; }, span);
}

void Fleet::Later(Nanos delay, Task task) {
  executor.PostAfter(delay, [this, task = std::move(task)] {
    if (!closing_) task();
  });
}

void Fleet::Disconnect(const std::string& address) {
  for (const auto& one : nodes_) {
    network.Break(address, one->shm_address());
    network.Break(address, one->tcp_address());
  }
}

Node& Fleet::node(const std::string& name) {
  return **std::ranges::find_if(nodes_, [&](const auto& one) { return one->name() == name; });
}
Rollout& Fleet::engine(const std::string& name) {
  return **std::ranges::find_if(engines_, [&](const auto& one) { return one->name() == name; });
}

coordinator::EngineStatus Fleet::StatusOf(const std::string& name) const {
  for (const auto& engine : coordinator_->Snapshot().engines) {
    if (engine.name == name) return engine;
  }
  return {};
}

/// I3 and I6: COMMIT is submitted only when every required engine holds the version, whole and
/// right.
void Fleet::OnAppend(const coordinator::JournalRecord& record) {
  const auto* commit = std::get_if<coordinator::CommitRecord>(&record);
  if (commit == nullptr) return;
  submitted_.insert(commit->epoch);
  std::vector<std::string> engines;
  for (const auto& status : coordinator_->Snapshot().epochs) {
    if (status.epoch == commit->epoch) engines.assign(status.engines.begin(), status.engines.end());
  }
  coordinator::EngineSum sum;
  for (const std::string& name : engines) sum.Add(name);
  EXPECT_EQ(commit->engines, sum) << "COMMIT(" << commit->epoch.value << ") is of others";
  const std::set<std::string> once(engines.begin(), engines.end());
  EXPECT_EQ(once.size(), engines.size()) << "an engine is counted twice";
  const uint32_t enough = options_.coordinator.commit_policy.Enough(1);
  EXPECT_GE(once.size(), commit->held == Epoch{} ? std::max(1u, enough) : 1u)
      << "COMMIT(" << commit->epoch.value << ") below the quorum";
  ledger.ExpectMayFollow(*commit);
  for (const std::string& name : engines) {
    EXPECT_TRUE(engine(name).HoldsStaged({commit->lineage, commit->version}))
        << "COMMIT(" << commit->epoch.value << ") without " << name;
  }
}

/// I6 again: a trainer may change its parameters when every engine of the epoch has them. One that
/// was cut off may hear of it after COMMIT, at which they were looked at: since then they may have
/// died and come back with nothing.
void Fleet::OnRelease(const epoch::ReleaseCommand& release) {
  if (!release.why.ok() || !released_.insert(release.epoch).second) return;
  if (submitted_.contains(release.epoch)) return;
  for (const auto& status : coordinator_->Snapshot().epochs) {
    if (status.epoch != release.epoch) continue;
    for (const std::string& name : status.engines) {
      EXPECT_TRUE(engine(name).HoldsStaged({status.lineage, release.version}))
          << "epoch " << release.epoch.value << " is released without " << name;
    }
  }
}

/// Of the engines whose names COMMIT counts; one that was lost before may be told to abort.
bool Fleet::Required(Epoch epoch, const epoch::Member& member) const {
  const auto snapshot = coordinator_->Snapshot();
  const auto rank =
      std::ranges::find(snapshot.participants, member, &coordinator::ParticipantStatus::member);
  const auto run = std::ranges::find(snapshot.epochs, epoch, &coordinator::EpochStatus::epoch);
  if (rank == snapshot.participants.end() || run == snapshot.epochs.end()) return false;
  return std::ranges::find(run->engines, rank->group) != run->engines.end();
}

void Fleet::OnCommand(const Node& node, const epoch::Command& command) {
  if (on_command) on_command(node, command);
  if (const auto* release = std::get_if<epoch::ReleaseCommand>(&command)) OnRelease(*release);
  if (const auto* abort = std::get_if<epoch::AbortCommand>(&command)) {
    EXPECT_FALSE(submitted_.contains(abort->epoch) && Required(abort->epoch, abort->member))
        << "ABORT(" << abort->epoch.value << ") after its COMMIT was submitted";
  }
  excluded_ += std::holds_alternative<epoch::ExcludeCommand>(command);
  const auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
  if (prepare == nullptr) return;
  EXPECT_GT(prepare->epoch, floor_) << "an epoch of an earlier coordinator is used again";
  newest_ = std::max(newest_, prepare->epoch);
  relayed_ += prepare->relayed;
}

}  // namespace weightwire::sim
