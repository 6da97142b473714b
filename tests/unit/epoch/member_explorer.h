#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "server/epoch/member_machine.h"

namespace weightwire::epoch::testing {

using MemberStepFn = std::function<MemberOutcome(MemberState, const MemberEvent&)>;

struct MemberExploration {
  std::string violation;  ///< empty: none. Names rule and seed
  uint64_t seed = 0;
  uint64_t steps = 0;
  std::map<std::string, uint64_t> reached;
};

/// Plays `seeds` lives of one member against `step`: a coordinator that mostly keeps the protocol
/// over several epochs, with commands repeated, reordered, forged and out of date, local work that
/// ends late or fails, evictions and crashes. Judges every action by its own record of what was
/// delivered and what runs. Stops at the first violation.
MemberExploration ExploreMember(const MemberStepFn& step, uint64_t first_seed, uint64_t seeds);

}  // namespace weightwire::epoch::testing
