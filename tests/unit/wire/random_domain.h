#pragma once

#include <cstdint>
#include <string>

#include "server/control/control.h"
#include "server/coordinator/journal.h"
#include "server/epoch/messages.h"
#include "server/plan/plan.h"

namespace weightwire::wire {

/// WEIGHTWIRE_SEED, or the default. Printed by the tests that use it.
uint64_t SeedFromEnvironment();

/// Small repeatable random numbers (splitmix64).
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed) {}
  uint64_t Next();
  /// 0 … bound − 1.
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  bool Coin() { return Below(2) == 0; }
  std::string Name(size_t length_max);

 private:
  uint64_t state_;
};

// Valid domain values of every shape that the wire carries.
Status RandomStatus(Dice& dice);
epoch::Member RandomMember(Dice& dice);
control::AgentHello RandomHello(Dice& dice);
control::RegisterRequest RandomRegister(Dice& dice);
control::PublishRequest RandomPublish(Dice& dice);
control::WithdrawRequest RandomWithdraw(Dice& dice);
control::LayoutSubmission RandomSubmission(Dice& dice);
layout::RankLayout RandomRankLayout(Dice& dice);
epoch::Command RandomCommand(Dice& dice);
epoch::Report RandomReport(Dice& dice);
plan::RankSlice RandomSlice(Dice& dice, size_t streams_max, size_t ops_max);
coordinator::JournalRecord RandomRecord(Dice& dice);

}  // namespace weightwire::wire
