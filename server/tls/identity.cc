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

std::optional<uint32_t> RankOf(std::string_view text) {
  uint32_t rank = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  const bool canonical = text.size() == 1 || (!text.empty() && text.front() != '0');
  if (error != std::errc() || end != text.data() + text.size() || !canonical) return std::nullopt;
  return rank;
}

}  // namespace

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const size_t end = text.find(separator);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

std::optional<Role> RoleOf(std::string_view name) {
  for (Role role : kRoles) {
    if (RoleName(role) == name) return role;
  }
  return std::nullopt;
}

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
  if (rank_last > 0) out.append("-").append(std::to_string(rank_last));
  return out;
}

Result<Identity> ParseIdentity(std::string_view uri, Ranges ranges) {
  if (uri.substr(0, kScheme.size()) != kScheme) return Bad(uri, "is no SPIFFE id");
  const std::vector<std::string_view> parts = Split(uri.substr(kScheme.size()), '/');
  const bool shaped = (parts.size() == 7 || (parts.size() == 9 && parts[7] == "rank")) &&
                      parts[1] == "ns" && parts[3] == "job" && parts[5] == "role";
  if (!shaped || !std::all_of(parts.begin(), parts.end(), IsSegment)) {
    return Bad(uri, "has not the form of weightwire's");
  }
  const auto role = RoleOf(parts[6]);
  if (!role) return Bad(uri, "names no role of weightwire's");
  Identity out{std::string(parts[0]), std::string(parts[2]), std::string(parts[4]), *role, {}};
  if (parts.size() == 9) {
    const size_t dash = ranges == Ranges::kAllowed ? parts[8].find('-') : std::string_view::npos;
    out.rank = RankOf(parts[8].substr(0, dash));
    if (!out.rank) return Bad(uri, "names no rank");
    if (dash != std::string_view::npos) {
      const auto last = RankOf(parts[8].substr(dash + 1));
      if (!last || *last <= *out.rank) return Bad(uri, "names no range of ranks");
      out.rank_last = *last;
    }
  }
  return out;
}

}  // namespace weightwire::tls
