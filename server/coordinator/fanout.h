#pragma once

#include <vector>

#include "server/epoch/coordinator_machine.h"

namespace weightwire::coordinator {

struct PrepareInput;

/// How the engines of one layout get the bytes of a version: all from the trainer (star), each from
/// the one before it (chain), each from one that feeds two others (tree), or whatever is faster.
enum class Fanout : int { kAuto = 1, kStar = 2, kChain = 3, kTree = 4 };

/// Who reads from whom, among engines of one plan: each one's parent as an index into `engines`, −1
/// for the trainer. No cycles; an engine has one child, in a tree up to three.
///
/// A trainer's link carries every engine's bytes in a star, and one engine's in a chain, which
/// takes a slot longer for each engine that is passed. A tree's links carry two engines' bytes, but
/// few engines are passed. kAuto: engines that map the trainer's memory read from it; the others
/// form from three on what should take less time at links of equal rate. Engines of one host are
/// next to each other: in a tree they hang on the first of them, one behind the other, and the
/// hosts on each other, two on one. An engine of `input.direct` keeps its place and its readers,
/// but reads from the trainer itself.
std::vector<int> ParentsOf(const PrepareInput& input,
                           const std::vector<const epoch::EngineMembers*>& engines);

}  // namespace weightwire::coordinator
