#pragma once

#include <array>
#include <span>
#include <string_view>

#include "server/base/status.h"
#include "server/tls/identity.h"

/// Who may call what, where certificates say who calls. docs/security.md shows the same table.
namespace weightwire::rpc {

enum class Right : int {
  kNo = 0,
  kOwnJob = 1,  ///< callers whose trust domain, namespace and job are the server's
  kYes = 2,     ///< callers of the server's trust domain
};

/// One RPC. Rights are those of trainer, engine, agent, operator and metrics, in this order; a
/// coordinator calls nobody.
struct RightsRow {
  std::string_view method;  ///< "/package.Service/Method"
  std::array<Right, 5> rights;
};
std::span<const RightsRow> RightsTable();
/// nullptr: nobody may call it.
const RightsRow* FindRights(std::string_view method);

/// Whether `caller` may call `method` of `server`. kPermissionDenied, naming both and who may.
Status CheckRight(std::string_view method, const tls::Identity& caller,
                  const tls::Identity& server);

}  // namespace weightwire::rpc
