#include "server/daemon/coordinator_gauges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <string>

namespace weightwire::daemon {
namespace {

coordinator::EngineStatus Engine(const std::string& name, uint64_t version, uint64_t lag,
                                 bool ready) {
  coordinator::EngineStatus engine;
  engine.name = name;
  engine.state = coordinator::EngineState::kServing;
  engine.version = Version(version);
  engine.lag = Version(lag);
  engine.ready = ready;
  engine.ranks_present = 1;
  return engine;
}

/// The lines of a scrape that begin with `prefix`.
std::set<std::string> Lines(const metrics::PrometheusSink& sink, const std::string& prefix) {
  std::set<std::string> found;
  std::istringstream text(sink.Text());
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with(prefix)) found.insert(line);
  }
  return found;
}

class CoordinatorGauges : public testing::Test {
 protected:
  CoordinatorGauges() { metrics::DeclareAll(sink_); }
  metrics::PrometheusSink sink_;
  coordinator::StatusSnapshot snapshot_;
};

TEST_F(CoordinatorGauges, AnEngineHasSeriesWhileItIsThere) {
  snapshot_.engines = {Engine("a", 4, 0, true), Engine("b", 1, 3, false)};
  SetCoordinatorGauges(snapshot_, sink_);
  EXPECT_EQ(Lines(sink_, "weightwire_engine_ready{"),
            (std::set<std::string>{"weightwire_engine_ready{engine=\"a\"} 1",
                                   "weightwire_engine_ready{engine=\"b\"} 0"}));
  EXPECT_EQ(Lines(sink_, "weightwire_engine_version{"),
            (std::set<std::string>{"weightwire_engine_version{engine=\"a\"} 4",
                                   "weightwire_engine_version{engine=\"b\"} 1"}));
  EXPECT_EQ(Lines(sink_, "weightwire_engine_versions_behind{"),
            (std::set<std::string>{"weightwire_engine_versions_behind{engine=\"a\"} 0",
                                   "weightwire_engine_versions_behind{engine=\"b\"} 3"}));
  // "a" is drained, "b" has left: nobody waits for them, and no alert may name them.
  snapshot_.engines[0].drained = true;
  snapshot_.engines[1].ranks_present = 0;
  SetCoordinatorGauges(snapshot_, sink_);
  EXPECT_EQ(Lines(sink_, "weightwire_engine_"), std::set<std::string>{});
}

TEST_F(CoordinatorGauges, WhoIsNotReadyIsListedInAnyLargeFleet) {
  for (int i = 0; i < 1000; ++i) {
    snapshot_.engines.push_back(Engine("e" + std::to_string(1000 + i), 4, 0, true));
  }
  snapshot_.engines.push_back(Engine("z", 0, 4, false));
  SetCoordinatorGauges(snapshot_, sink_);
  const auto ready = Lines(sink_, "weightwire_engine_ready{");
  EXPECT_EQ(ready.size(), 256U);
  EXPECT_TRUE(ready.contains("weightwire_engine_ready{engine=\"z\"} 0"));
  EXPECT_EQ(Lines(sink_, "weightwire_engines_unlisted"),
            (std::set<std::string>{"weightwire_engines_unlisted 745"}));
}

TEST_F(CoordinatorGauges, AFlipThatIsNotAcknowledgedAndAWaitAreSeen) {
  snapshot_.engines = {Engine("a", 4, 0, true), Engine("b", 3, 1, true)};
  snapshot_.engines[1].state = coordinator::EngineState::kInstalling;
  snapshot_.waiting_seconds = 12.5;
  SetCoordinatorGauges(snapshot_, sink_);
  EXPECT_EQ(Lines(sink_, "weightwire_engines_installing"),
            (std::set<std::string>{"weightwire_engines_installing 1"}));
  EXPECT_EQ(Lines(sink_, "weightwire_waiting_seconds"),
            (std::set<std::string>{"weightwire_waiting_seconds 12.5"}));
}

}  // namespace
}  // namespace weightwire::daemon
