#include "server/tls/identity.h"

#include <algorithm>
#include <charconv>
#include <vector>

namespace weightwire::tls {
namespace {

constexpr std::string_view kScheme = "spiffe://";
constexpr Role kRoles[] = {Role::kTrainer,  Role::kEngine,  Role::kAgent,
                           Role::kOperator, Role::kMetrics, Role::kCoordinator};

tl::unexpected<Status> Bad(std::string_view uri, const std::string& what) {
  return Fail(Status(Code::kUnauthenticated, Reason::kPermissionDenied,
                     "the identity \"" + std::string(uri.substr(0, 256)) + "\" " + what)
                  .Remedy("issue a certificate whose one URI SAN is "
                          "spiffe://<domain>/ns/<ns>/job/<job>/role/<role>[/rank/<n>]"));
}

/// What SPIFFE allows in a segment of a path, and in a trust domain but for capitals.
bool IsSegment(std::string_view text) {
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  });
}

std::vector<std::string_view> Split(std::string_view text) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t slash = text.find('/');
    parts.push_back(text.substr(0, slash));
    if (slash == std::string_view::npos) return parts;
    text.remove_prefix(slash + 1);
  }
}

std::optional<Role> RoleOf(std::string_view name) {
  for (Role role : kRoles) {
    if (RoleName(role) == name) return role;
  }
  return std::nullopt;
}

std::optional<uint32_t> RankOf(std::string_view text) {
  uint32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  const bool canonical = text.size() == 1 || (!text.empty() && text.front() != '0');
  if (error != std::errc() || end != text.data() + text.size() || !canonical) return std::nullopt;
  return rank;
}

}  // namespace

std::string_view RoleName(Role role) {
  switch (role) {
    case Role::kTrainer:
      return "trainer";
    case Role::kEngine:
      return "engine";
    case Role::kAgent:
      return "agent";
    case Role::kOperator:
      return "operator";
    case Role::kMetrics:
      return "metrics";
    case Role::kCoordinator:
      return "coordinator";
  }
  return "invalid";
}

std::string Identity::Uri() const {
  std::string out = std::string(kScheme) + domain + "/ns/" + ns + "/job/" + job + "/role/" +
                    std::string(RoleName(role));
  if (rank) out += "/rank/" + std::to_string(*rank);
  return out;
}

Result<Identity> ParseIdentity(std::string_view uri) {
  if (uri.substr(0, kScheme.size()) != kScheme) return Bad(uri, "is no SPIFFE id");
  const std::vector<std::string_view> parts = Split(uri.substr(kScheme.size()));
  const bool shaped = (parts.size() == 7 || (parts.size() == 9 && parts[7] == "rank")) &&
                      parts[1] == "ns" && parts[3] == "job" && parts[5] == "role";
  if (!shaped || !std::all_of(parts.begin(), parts.end(), IsSegment)) {
    return Bad(uri, "has not the form of weightwire's");
  }
  const auto role = RoleOf(parts[6]);
  if (!role) return Bad(uri, "names no role of weightwire's");
  Identity out{std::string(parts[0]), std::string(parts[2]), std::string(parts[4]), *role, {}};
  if (parts.size() == 9) {
    out.rank = RankOf(parts[8]);
    if (!out.rank) return Bad(uri, "names no rank");
  }
  return out;
}

}  // namespace weightwire::tls
