#pragma once

#include <string>
#include <string_view>

#include "server/plan/plan.h"

namespace weightwire::plan {

/// What the groups of both sides are called: ranks are named after them, "trainer/3".
struct GroupNames {
  std::string source = "source";
  std::string target = "target";
};

/// Lines a person reads: totals, bytes per rank, the source × target matrix (when it is at most
/// 16 × 16), and for `tensor` (canonical name; empty = none) every copy with its boxes.
std::string Explain(const TransferPlan& plan, const layout::ModelLayout& source,
                    const layout::ModelLayout& target, std::string_view tensor,
                    const GroupNames& names = {});

}  // namespace weightwire::plan
