#pragma once

#include <vector>

#include "server/epoch/coordinator_machine.h"

namespace weightwire::coordinator {

struct PrepareInput;

/// How the engines of one layout get the bytes of a version: all from the trainer (star), each from
/// the one before it (chain), or whatever is faster.
enum class Fanout : int { kAuto = 1, kStar = 2, kChain = 3 };

/// Who reads from whom, among engines of one plan: each one's parent as an index into `engines`, −1
/// for the trainer. No cycles; no engine has two children.
///
/// A trainer's link carries every engine's bytes in a star, and one engine's in a chain, which
/// takes a few slots longer for each engine that is passed. kAuto: engines that map the trainer's
/// memory read from it; the others form a chain from three on. Engines of one host are next to each
/// other. An engine of `input.direct` keeps its place in the chain and its reader, but reads from
/// the trainer itself.
std::vector<int> ParentsOf(const PrepareInput& input,
                           const std::vector<const epoch::EngineMembers*>& engines);

}  // namespace weightwire::coordinator
