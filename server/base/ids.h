#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace weightwire {

/// An integer that cannot be mixed up with another kind of integer.
template <typename Tag, typename Rep>
struct StrongId {
  Rep value{};
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep v) : value(v) {}
  friend constexpr auto operator<=>(StrongId, StrongId) = default;
};

/// One process of a job (a trainer rank or one rank of an engine). Given by the coordinator at
/// registration; the same (job, group, rank) keeps it through restarts. 0 is nobody.
using ParticipantId = StrongId<struct ParticipantTag, uint32_t>;
/// One sidecar. Given by the coordinator when its session opens. 0 is nobody.
using AgentId = StrongId<struct AgentTag, uint32_t>;
/// One process lifetime. Random, chosen by the process itself, never 0.
using Incarnation = StrongId<struct IncarnationTag, uint64_t>;
/// Our attempt at moving a version, or a fill. Only rises. 0 is none.
using Epoch = StrongId<struct EpochTag, uint64_t>;
/// What the trainer counts. Only rises while the trainer lives. 0 is none.
using Version = StrongId<struct VersionTag, uint64_t>;

/// The decisions of one journal, from when it was empty. Random, written into it. 0: not known.
using JournalId = StrongId<struct HistoryTag, uint64_t>;

/// 128 bits over layouts and planner options; equal inputs give equal ids in every process.
struct PlanId {
  uint64_t high = 0;
  uint64_t low = 0;
  friend constexpr auto operator<=>(const PlanId&, const PlanId&) = default;
  std::string ToHex() const;  ///< 32 lower-case hex digits
};

/// 128-bit secret that lets one agent read from another. Minted by the coordinator.
using Ticket = std::array<uint8_t, 16>;

}  // namespace weightwire

template <typename Tag, typename Rep>
struct std::hash<weightwire::StrongId<Tag, Rep>> {
  size_t operator()(weightwire::StrongId<Tag, Rep> id) const { return std::hash<Rep>()(id.value); }
};
template <>
struct std::hash<weightwire::PlanId> {
  size_t operator()(const weightwire::PlanId& id) const { return id.low ^ (id.high * 31); }
};
