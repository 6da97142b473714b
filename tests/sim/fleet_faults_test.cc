#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "tests/sim/fleet.h"

// Versions are published one after another while faults of every kind strike at random moments;
// the harness checks the invariants after every step. Then the faults stop, and within a bound a
// last version is served everywhere. Every run is one seed: WEIGHTWIRE_SEED replays it,
// WEIGHTWIRE_SEEDS sets how many are run, WEIGHTWIRE_FIRST from which on. WEIGHTWIRE_SHOW names
// each before it runs, for when one ends the process. That this catches bugs, mutants.py proves.
namespace weightwire::sim {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kSeeds = 200;

/// What the runs came across, from the coordinator's history: a branch that is never taken proves
/// nothing.
struct Reached {
  uint64_t commits = 0, aborts = 0, retries = 0, fills = 0, dropped_fills = 0;
  uint64_t crashes = 0, recovered_commits = 0, journal_failures = 0;
  uint64_t trainer_evictions = 0, engine_ends = 0, given_up = 0, rooms = 0, relayed = 0;
  uint64_t rollbacks = 0, failed_rollbacks = 0;

  std::map<std::string, uint64_t> aborted_for;  ///< by reason; fills and publishes
  std::map<std::string, uint64_t> crashed_in;   ///< coordinators, by the newest publish's phase

  void Count(const coordinator::EpochStatus& epoch) {
    const bool committed = epoch.phase == epoch::Phase::kCommitted;
    const bool aborted = epoch.phase == epoch::Phase::kAborted;
    if (aborted) ++aborted_for[std::string(ReasonName(epoch.why.reason()))];
    if (epoch.kind == epoch::Kind::kRollback) {
      rollbacks += committed;
      failed_rollbacks += aborted;
      return;
    }
    if (epoch.kind == epoch::Kind::kFill) {
      fills += committed;
      dropped_fills += aborted;
      return;
    }
    commits += committed;
    aborts += aborted;
    retries += epoch.attempt > 1;
  }
};

class Chaos {
 public:
  Chaos(uint64_t seed, Reached& reached)
      : random_(seed * 7919 + 1), fleet_(OptionsFor(seed)), reached_(reached) {}

  void Run() {
    ASSERT_TRUE(fleet_.Start());
    for (int round = 0; round < 12 && !::testing::Test::HasFatalFailure(); ++round) {
      if (In(0, 1) == 0) GoBack();
      if (fleet_.coordinator() != nullptr && fleet_.trainer().Idle()) {
        reached_.given_up += !fleet_.trainer().outcome().ok();
        fleet_.trainer().Publish(
            ++version_, In(0, 3) == 0 ? agent::PublishMode::kSnapshot : agent::PublishMode::kHold,
            seconds(20));
      }
      fleet_.RunFor(Up(milliseconds(120)));
      if (In(0, 3) != 0) Strike();
      fleet_.RunFor(In(0, 2) == 0 ? Up(seconds(8)) : Up(milliseconds(400)));
    }
    Heal();
    Settle();
    CountEpochs();
    reached_.trainer_evictions += fleet_.trainer().evictions();
    reached_.relayed += fleet_.relayed();
    for (const auto& engine : fleet_.engines()) {
      reached_.engine_ends += engine->lives() - 1;
      reached_.rooms += engine->rooms();
    }
  }

 private:
  static Fleet::Options OptionsFor(uint64_t seed) {
    Fleet::Options options;
    std::mt19937_64 random(seed);
    options.seed = seed;
    options.message_delay_max = milliseconds(random() % 30);
    options.journal_delay = milliseconds(random() % 40);
    options.repeat_reports = true;
    options.link.latency = std::chrono::microseconds(random() % 2000);
    options.link.get_jitter_max = std::chrono::microseconds(random() % 3000);
    options.tuning.get_timeout = seconds(2);
    options.tuning.progress_timeout = seconds(3);
    options.tuning.connect_timeout = seconds(1);
    options.tuning.drain_grace = seconds(1);
    if (random() % 2 == 0) {
      // Three of one layout, which pass versions on to each other.
      options.engines.push_back({"one-b", VllmTp1(), {"rollout-b"}});
      options.engines.push_back({"one-c", VllmTp1(), {"rollout-c"}});
      options.coordinator.fanout = coordinator::Fanout::kChain;
    }
    for (auto& engine : options.engines) engine.buffers = 1 + random() % memory::kBuffersMax;
    return options;
  }

  int64_t In(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }
  Nanos Up(Nanos most) { return Nanos(In(0, most.count())); }
  Node& AnyNode() {
    return *fleet_.nodes()[static_cast<size_t>(In(0, std::ssize(fleet_.nodes()) - 1))];
  }

  void Strike() {
    switch (In(0, 9)) {
      case 0: {
        auto& engine =
            *fleet_.engines()[static_cast<size_t>(In(0, std::ssize(fleet_.engines()) - 1))];
        return engine.KillRank(static_cast<uint32_t>(In(0, engine.size() - 1)));
      }
      case 1:
        return fleet_.trainer().KillRank(static_cast<uint32_t>(In(0, 3)));
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

  /// To a version that some engine holds, or to one that nobody may hold any more. It may run into
  /// whatever comes next: the answer is nobody's business.
  void GoBack() {
    if (fleet_.coordinator() == nullptr) return;
    Version version{version_ / 2};
    for (const auto& engine : fleet_.coordinator()->Snapshot().engines) {
      if (engine.held.epoch != Epoch{} && In(0, 2) != 0) version = engine.held.version;
    }
    fleet_.coordinator()->Rollback(version, [](const auto&) {});
    fleet_.RunFor(Up(milliseconds(60)));
  }

  void KillNode() {
    Node& node = AnyNode();
    if (!node.alive()) return;
    node.Kill(In(0, 1) == 0);
    fleet_.Later(Up(seconds(8)), [&node] {
      if (!node.alive()) node.Start();
    });
  }

  void HurtLink() {
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

  void CountEpochs() {
    for (const auto& epoch : fleet_.coordinator()->Snapshot().epochs) reached_.Count(epoch);
  }

  void CrashCoordinator() {
    if (fleet_.coordinator() == nullptr) return;
    // Half of the time while a record is under way, if one comes soon.
    if (In(0, 1) == 0) {
      fleet_.RunUntil([this] { return fleet_.journal.pending() > 0; }, seconds(1));
    }
    CountEpochs();
    ++reached_.crashes;
    ++reached_.crashed_in[std::string(epoch::PhaseName(fleet_.NewestPhase()))];
    const size_t durable = fleet_.journal.durable().size();
    fleet_.CrashCoordinator();
    reached_.recovered_commits += fleet_.journal.durable().size() > durable;
    fleet_.Later(Up(seconds(4)), [this] {
      if (fleet_.coordinator() == nullptr) fleet_.StartCoordinator();
    });
  }

  void Heal() {
    fleet_.journal.StopFailing();
    fleet_.RunFor(seconds(12));
    if (fleet_.coordinator() != nullptr && !fleet_.coordinator()->Snapshot().deciding) {
      ++reached_.journal_failures;
      CountEpochs();
      fleet_.CrashCoordinator();
      fleet_.StartCoordinator();
    }
  }

  /// L1 and L2: within a bound everyone serves a version that was published after the last fault.
  void Settle() {
    Status status;
    for (int attempt = 0; attempt < 4 && !::testing::Test::HasFatalFailure(); ++attempt) {
      ASSERT_TRUE(fleet_.RunUntil([this] { return fleet_.trainer().Idle(); }, seconds(90)))
          << "the trainer never came back";
      status = fleet_.Publish(++version_, agent::PublishMode::kHold, seconds(30));
      if (status.ok()) break;
      // A snapshot of a version that not every rank published is held until its deadline, 20 s.
      fleet_.RunFor(seconds(8));
    }
    ASSERT_TRUE(status.ok()) << status.ToString() << "\nwaits for "
                             << fleet_.coordinator()->Snapshot().waiting_for;
    EXPECT_TRUE(fleet_.AllServe(version_, seconds(60)))
        << "waits for " << fleet_.coordinator()->Snapshot().waiting_for;
  }

  std::mt19937_64 random_;
  Fleet fleet_;
  Reached& reached_;
  uint64_t version_ = 0;
};

uint64_t Number(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

std::string NameOf(Reason reason) { return std::string(ReasonName(reason)); }
std::string NameOf(epoch::Phase phase) { return std::string(epoch::PhaseName(phase)); }

/// Prints every count; those of `wanted` must not be 0.
template <typename Enum>
void Expect(const std::map<std::string, uint64_t>& counts, const char* what,
            std::initializer_list<Enum> wanted) {
  for (const auto& [name, times] : counts) {
    std::printf("%llu %s%s\n", static_cast<unsigned long long>(times), what, name.c_str());
  }
  for (Enum one : wanted) {
    EXPECT_TRUE(counts.contains(NameOf(one))) << "never reached: " << what << NameOf(one);
  }
}

TEST(FleetFaults, NoFaultMakesAnEngineServeAnythingButOneCommittedVersion) {
  const uint64_t only = Number("WEIGHTWIRE_SEED", 0);
  const uint64_t first = only == 0 ? Number("WEIGHTWIRE_FIRST", 1) : only;
  const uint64_t last = only == 0 ? first + Number("WEIGHTWIRE_SEEDS", kSeeds) - 1 : only;
  const bool show = std::getenv("WEIGHTWIRE_SHOW") != nullptr;
  Reached reached;
  for (uint64_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("replay with WEIGHTWIRE_SEED=" + std::to_string(seed));
    if (show) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    Chaos(seed, reached).Run();
    if (HasFailure()) {
      std::printf("failed with WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
      return;
    }
  }
  if (last - first + 1 < kSeeds) return;
  for (const auto& [what, times] : std::map<std::string, uint64_t>{
           {"commits", reached.commits},
           {"aborts", reached.aborts},
           {"retries", reached.retries},
           {"fills", reached.fills},
           {"fills dropped", reached.dropped_fills},
           {"coordinator crashes", reached.crashes},
           {"records that only the crashed coordinator's disk knew", reached.recovered_commits},
           {"journal failures", reached.journal_failures},
           {"trainer evictions", reached.trainer_evictions},
           {"ends of engines", reached.engine_ends},
           {"ranks that read from another engine", reached.relayed},
           {"buffers given up for the next version", reached.rooms},
           {"rollbacks", reached.rollbacks},
           {"rollbacks that did not come about", reached.failed_rollbacks},
           {"versions not moved", reached.given_up}}) {
    std::printf("%llu %s\n", static_cast<unsigned long long>(times), what.c_str());
    EXPECT_GT(times, 0u) << "never reached: " << what;
  }
  Expect(reached.aborted_for, "aborted for ",
         {Reason::kMemberLost, Reason::kDeadlineExceeded, Reason::kTransportFailed,
          Reason::kDigestMismatch, Reason::kAbortRequested, Reason::kNotReady});
  Expect(reached.crashed_in, "coordinators crashed in ",
         {epoch::Phase::kPreparing, epoch::Phase::kTransferring, epoch::Phase::kCommitting,
          epoch::Phase::kCommitted, epoch::Phase::kAborting, epoch::Phase::kAborted});
}

}  // namespace
}  // namespace weightwire::sim
