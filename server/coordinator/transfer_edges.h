#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/base/ids.h"

namespace weightwire::coordinator {

/// What one agent read from another over one transport in one epoch.
struct TransferEdge {
  std::string source, target;  ///< agents, which are called as their pods or hosts
  std::string transport;
  int64_t bytes = 0;
  double seconds = 0;  ///< in which a read of it was under way; those that overlap count once
  friend bool operator==(const TransferEdge&, const TransferEdge&) = default;
};
/// Of an epoch that was committed: the edges over which most bytes went, those first.
struct EpochEdges {
  static constexpr size_t kEdgesMax = 256;
  Epoch epoch{};
  Version version{};
  std::vector<TransferEdge> edges;
  uint64_t left_off = 0;  ///< edges beyond kEdgesMax
};

/// Puts the reads of ranks together to edges. A plain value.
class EdgeStats {
 public:
  /// Times are of the target's clock.
  void Add(const std::string& source, const std::string& target, const std::string& transport,
           int64_t begin_us, int64_t duration_us, int64_t bytes);
  /// `epoch` and `version` are the caller's to set.
  EpochEdges Take();

 private:
  struct Reads {
    TransferEdge edge;
    std::vector<std::pair<int64_t, int64_t>> spans_us;  ///< from, to
  };
  std::map<std::pair<std::string, std::string>, std::map<std::string, Reads>> reads_;
};

}  // namespace weightwire::coordinator
