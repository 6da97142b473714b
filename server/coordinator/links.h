#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/base/ids.h"

namespace weightwire::coordinator {

/// What one agent read from another over one transport in one epoch.
struct Link {
  std::string source, target;  ///< agents, which are called as their pods or hosts
  std::string transport;
  int64_t bytes = 0;
  double seconds = 0;  ///< in which a read of it was under way; those that overlap count once
  friend bool operator==(const Link&, const Link&) = default;
};
/// Of an epoch that was committed: the links over which most bytes went, those first.
struct EpochLinks {
  static constexpr size_t kLinksMax = 256;
  Epoch epoch{};
  Version version{};
  std::vector<Link> links;
  uint64_t left_off = 0;  ///< links beyond kLinksMax
};

/// Puts the reads of ranks together to links. A plain value.
class LinkSums {
 public:
  /// Times are of the target's clock.
  void Add(const std::string& source, const std::string& target, const std::string& transport,
           int64_t begin_us, int64_t duration_us, int64_t bytes);
  /// `epoch` and `version` are the caller's to set.
  EpochLinks Take();

 private:
  struct Reads {
    Link link;
    std::vector<std::pair<int64_t, int64_t>> spans_us;  ///< from, to
  };
  std::map<std::pair<std::string, std::string>, std::map<std::string, Reads>> reads_;
};

}  // namespace weightwire::coordinator
