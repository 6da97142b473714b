#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/plan/classes.h"
#include "server/plan/fluid.h"
#include "server/plan/plan.h"

namespace weightwire::plan {

/// How the ranks of a layout class get what the class needs.
enum class Topology : int {
  kStar = 1,   ///< every rank reads from the sources
  kChain = 2,  ///< the first reads from the sources, each other from the one before it
  kTree = 3,   ///< the first reads from the sources, rank i of the class from rank (i − 1) / 2
};

struct LinkModel {
  double bytes_per_second = 0;  ///< of every rank's link, each way at once; > 0
  double latency_seconds = 0;   ///< from a segment's sending to its arrival, per hop
  Topology topology = Topology::kStar;
  Sharing sharing = Sharing::kByBytes;
  /// A relay hands a segment on when it has all of it.
  int64_t segment_bytes = 4 << 20;
};

struct Simulation {
  double seconds = 0;
  /// The link that is busy longest, e.g. "source/3 egress", "target/0 ingress", and how long it
  /// would be busy at full rate.
  std::string bottleneck;
  double bottleneck_seconds = 0;
  std::vector<int64_t> source_egress;   ///< bytes, by source rank
  std::vector<int64_t> target_ingress;  ///< by target rank of the whole layout
  std::vector<int64_t> target_egress;   ///< what the rank relays
  std::vector<double> source_end;       ///< seconds; 0 for a rank without streams
  std::vector<double> target_end;       ///< when the rank has everything
};

/// Predicts a transfer from `plan`, which was made for one rank per class (OnePerClass), to all
/// ranks of all classes. All streams start together and share links as `model.sharing` says; a
/// relayed segment lags one segment's time and one latency behind the one before it.
Simulation Simulate(const TransferPlan& plan, const std::vector<LayoutClass>& classes,
                    const LinkModel& model);

}  // namespace weightwire::plan
