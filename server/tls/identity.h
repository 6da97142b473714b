#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/base/status.h"

namespace weightwire::tls {

/// What a certificate's owner is. `kAgent` serves trainers and engines of one host.
enum class Role : int {
  kTrainer = 1,
  kEngine = 2,
  kAgent = 3,
  kOperator = 4,
  kMetrics = 5,
  kCoordinator = 6,
};
std::string_view RoleName(Role role);

/// spiffe://<domain>/ns/<ns>/job/<job>/role/<role>[/rank/<n>], in a token also [/rank/<n>-<m>]
struct Identity {
  std::string domain;
  std::string ns;
  std::string job;
  Role role = Role::kMetrics;
  std::optional<uint32_t> rank;  ///< nullopt: any
  uint32_t rank_last = 0;        ///< of a range that begins at `rank`; else 0

  std::string Uri() const;
  bool Covers(uint32_t some) const {
    return !rank || some == *rank || (*rank < some && some <= rank_last);
  }
  friend bool operator==(const Identity&, const Identity&) = default;
};

/// kUnauthenticated / kPermissionDenied for anything but the form above. Ranges are refused where
/// `ranges` does not say that they may be.
enum class Ranges { kRefused, kAllowed };
Result<Identity> ParseIdentity(std::string_view uri, Ranges ranges = Ranges::kRefused);
/// What lies between separators: one part more than there are of them.
std::vector<std::string_view> Split(std::string_view text, char separator);
/// nullopt where there is no such role.
std::optional<Role> RoleOf(std::string_view name);

}  // namespace weightwire::tls
