#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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

/// spiffe://<domain>/ns/<ns>/job/<job>/role/<role>[/rank/<n>]
struct Identity {
  std::string domain;
  std::string ns;
  std::string job;
  Role role = Role::kMetrics;
  std::optional<uint32_t> rank;

  std::string Uri() const;
  friend bool operator==(const Identity&, const Identity&) = default;
};

/// kUnauthenticated / kPermissionDenied for anything but the form above.
Result<Identity> ParseIdentity(std::string_view uri);

}  // namespace weightwire::tls
