#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/sim/chaos.h"

// Thousands of fleets under random faults (chaos.h), one for each seed. WEIGHTWIRE_SEED replays
// one, WEIGHTWIRE_SEEDS sets how many are run, WEIGHTWIRE_FIRST from which on, WEIGHTWIRE_PROCESSES
// in how many processes. WEIGHTWIRE_SHOW names each before it runs, for when one ends the process.
// WEIGHTWIRE_REACH_ALL=1 also says of few seeds what they never reached.
// That this catches bugs, mutants.py proves.
namespace weightwire::sim {
namespace {

constexpr uint64_t kSeeds = 400;
/// Fewer need not come across everything.
constexpr uint64_t kSeedsThatReachAll = 5000;

uint64_t Number(const char* name, uint64_t fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::strtoull(text, nullptr, 10);
}

/// Of the seeds from `first` to `last` every `step`-th. Stops at the first that fails.
Reached RunSeeds(uint64_t first, uint64_t last, uint64_t step) {
  const bool show = std::getenv("WEIGHTWIRE_SHOW") != nullptr;
  Reached reached;
  for (uint64_t seed = first; seed <= last; seed += step) {
    SCOPED_TRACE("replay with WEIGHTWIRE_SEED=" + std::to_string(seed));
    if (show) std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
    Chaos(seed, reached).Run();
    if (::testing::Test::HasFailure()) {
      std::printf("failed with WEIGHTWIRE_SEED=%llu\n", static_cast<unsigned long long>(seed));
      std::fflush(stdout);
      break;
    }
  }
  return reached;
}

/// A copy of this process that runs its share of the seeds and tells through a pipe what it
/// reached. It says itself what failed; its exit status is not 0 then.
class Share {
 public:
  Share(uint64_t first, uint64_t last, uint64_t step) {
    int ends[2];
    WW_CHECK(pipe(ends) == 0);
    std::fflush(stdout);
    child_ = fork();
    WW_CHECK(child_ >= 0);
    if (child_ == 0) Tell(ends[1], RunSeeds(first, last, step));
    close(ends[1]);
    told_ = ends[0];
  }
  void Join(Reached& reached) {
    std::string text;
    char buffer[4096];
    for (ssize_t got; (got = read(told_, buffer, sizeof buffer)) > 0;) {
      text.append(buffer, static_cast<size_t>(got));
    }
    close(told_);
    int status = 0;
    WW_CHECK(waitpid(child_, &status, 0) == child_);
    EXPECT_EQ(status, 0) << "a process that ran seeds failed or ended: see above";
    std::istringstream lines(text);
    reached.Read(lines);
  }

 private:
  [[noreturn]] static void Tell(int pipe, const Reached& reached) {
    std::ostringstream lines;
    reached.Write(lines);
    const std::string text = lines.str();
    const bool told = write(pipe, text.data(), text.size()) == std::ssize(text);
    std::fflush(stdout);
    _exit(told && !::testing::Test::HasFailure() ? 0 : 1);
  }
  pid_t child_ = 0;
  int told_ = -1;
};

TEST(FleetFaults, NoFaultMakesAnEngineServeAnythingButOneCommittedVersion) {
  const uint64_t only = Number("WEIGHTWIRE_SEED", 0);
  const uint64_t first = only == 0 ? Number("WEIGHTWIRE_FIRST", 1) : only;
  const uint64_t seeds = only == 0 ? Number("WEIGHTWIRE_SEEDS", kSeeds) : 1;
  const uint64_t processes = Number("WEIGHTWIRE_PROCESSES", 1);
  const uint64_t last = first + seeds - 1;
  Reached reached;
  if (processes == 1) {
    reached = RunSeeds(first, last, 1);
  } else {
    std::vector<Share> shares;
    for (uint64_t i = 0; i < processes; ++i) shares.emplace_back(first + i, last, processes);
    for (Share& share : shares) share.Join(reached);
  }
  if (HasFailure()) return;
  if (seeds < kSeedsThatReachAll && Number("WEIGHTWIRE_REACH_ALL", 0) == 0) return;
  reached.Write(std::cout);
  reached.ExpectAll();
}

}  // namespace
}  // namespace weightwire::sim
