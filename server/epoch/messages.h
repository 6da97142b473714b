#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "server/base/clock.h"
#include "server/base/delta_figures.h"
#include "server/base/ids.h"
#include "server/base/status.h"

/// What coordinator and agents say to each other. Plain data; proto <-> domain is wire's work.
/// Every message carries epoch and, where a participant is meant, its incarnation: an older one is
/// refused by whoever receives it.
namespace weightwire::epoch {

/// A process as the protocol names it.
struct Member {
  ParticipantId id{};
  Incarnation incarnation{};
  friend auto operator<=>(const Member&, const Member&) = default;
};

enum class Role : int { kSource = 1, kTarget = 2 };

/// What moves: `kPublish` is an epoch of the fleet; `kFill` brings one engine to a committed epoch;
/// `kRollback` moves nothing: its engines serve again what their other buffers still hold.
enum class Kind : int { kPublish = 1, kFill = 2, kRollback = 3 };

/// What a buffer holds whole: bytes that were verified and committed in this life of the rank.
struct Content {
  Epoch epoch{};  ///< 0: nothing that may be served
  Version version{};
  friend bool operator==(const Content&, const Content&) = default;
};
/// Of one rank or engine, newest epoch first.
using Contents = std::vector<Content>;

/// How an agent reaches another one, with the secret for exactly this pair.
struct PeerAddress {
  AgentId agent{};
  Incarnation incarnation{};
  std::string host;
  std::map<std::string, std::string> addresses;
  Ticket ticket{};
  friend bool operator==(const PeerAddress&, const PeerAddress&) = default;
};

/// A plan that a member takes part in.
struct PlanAssignment {
  PlanId plan;
  uint32_t rank = 0;     ///< the member's rank on its side of the plan
  uint32_t readers = 1;  ///< source side: engines that read each stream of this plan
  friend bool operator==(const PlanAssignment&, const PlanAssignment&) = default;
};

/// Who may open streams of a source or relay.
struct Reader {
  ParticipantId participant{};
  uint32_t rank = 0;     ///< of its engine; it opens streams to this rank
  Incarnation caller{};  ///< its agent's; one of those in `admitted`
  friend bool operator==(const Reader&, const Reader&) = default;
};

// ---- coordinator → agent --------------------------------------------------------------------

/// Get ready to move: fetch the plan's slice, bind memory, admit tickets. Answer: PreparedReport or
/// FailedReport. A rollback has no assignments and no sources: prepared is who still holds `held`.
struct PrepareCommand {
  Epoch epoch{};
  Kind kind = Kind::kPublish;
  Version version{};
  Epoch content{};  ///< the epoch whose bytes move: `epoch` itself, or the committed one of a fill
  Member member;
  Role role = Role::kSource;
  Epoch held{};  ///< rollback: what another buffer must hold; becomes `content`
  std::vector<PlanAssignment> assignments;  ///< one for a target
  /// Target side: who sends, by source rank of the plan.
  std::map<uint32_t, PeerAddress> sources;
  std::map<uint32_t, ParticipantId> source_participants;
  /// Target side: `sources` is a rank of an equal layout that passes on what it receives
  /// (plan/relayed.h), in place of every source rank of the plan.
  bool relayed = false;
  /// Target side: ranks that read from this one what it has received.
  uint32_t relay_readers = 0;
  /// Source or relay: a reader that keeps a slot so long after another one has given it back is
  /// detached, for the others can do without it; whole milliseconds, 0: never.
  Nanos stall_limit{0};
  /// Source or relay: tickets that readers will show, with the caller's incarnation.
  std::vector<std::pair<Ticket, Incarnation>> admitted;
  /// Source or relay: who shows them. Empty: a coordinator that does not say.
  std::vector<Reader> readers = {};
  std::array<uint8_t, 16> trace_id{};
  uint64_t lineage = 0;  ///< of `version`; 0: not known
  /// Source: whether the others go on without a reader that is lost, the coordinator says
  /// (ExcludeCommand). Until it does, the loss is no failure of this member.
  bool drops_readers = false;
  friend bool operator==(const PrepareCommand&, const PrepareCommand&) = default;
};
/// Everyone is prepared: move. Answer: SourceDoneReport or StagedReport, or FailedReport.
struct TransferCommand {
  Epoch epoch{};
  Member member;
  friend bool operator==(const TransferCommand&, const TransferCommand&) = default;
};
/// Source: the publisher may change its parameters again, because the bytes are staged everywhere
/// (`why` is OK), or because the version was given up (`why` says why; no attempt will follow).
struct ReleaseCommand {
  Epoch epoch{};
  Version version{};
  Member member;
  Status why;
  friend bool operator==(const ReleaseCommand&, const ReleaseCommand&) = default;
};
/// Target: COMMIT is durable. Every rank learns of it; the leader is asked to swap.
struct CommitCommand {
  Epoch epoch{};
  Version version{};
  Epoch content{};
  Member member;
  bool leader = false;
  friend bool operator==(const CommitCommand&, const CommitCommand&) = default;
};
/// Target: the whole engine has swapped; the old buffer is free.
struct CommittedEverywhereCommand {
  Epoch epoch{};
  Member member;
  friend bool operator==(const CommittedEverywhereCommand&,
                         const CommittedEverywhereCommand&) = default;
};
/// Stop, drain, answer DrainedReport. For targets and sources in any phase before commit. A source
/// still holds its bytes afterwards: the version may be tried again under a new epoch.
struct AbortCommand {
  Epoch epoch{};
  Member member;
  Status why;
  friend bool operator==(const AbortCommand&, const AbortCommand&) = default;
};
/// The incarnation is fenced: it must stop serving, drop its stage and register again.
struct EvictCommand {
  Member member;
  Status why;
  friend bool operator==(const EvictCommand&, const EvictCommand&) = default;
};
/// Target: `committed` was decided without this engine. It serves on what it serves, but is not
/// ready until it is filled: until it serves `committed` or a later one. Needs no answer.
struct StaleCommand {
  Epoch committed{};
  Member member;
  friend bool operator==(const StaleCommand&, const StaleCommand&) = default;
};
/// Engine: sum what is served, as the slice `reading` says (content/hash_plan.h). Belongs to no
/// epoch and changes nothing; answered by HashedReport.
struct HashCommand {
  uint64_t verification = 0;  ///< numbers the question
  Epoch content{};            ///< what should be served
  Member member;
  PlanId reading;
  uint32_t rank = 0;
  friend bool operator==(const HashCommand&, const HashCommand&) = default;
};
/// Source or relay: the epoch goes on without an engine that was to read from here, and nothing is
/// waited for from its ranks any more. Needs no answer. It may come before TransferCommand.
struct ExcludeCommand {
  Epoch epoch{};
  Member member;
  PlanId plan;                         ///< by which the engine was to read
  std::vector<ParticipantId> readers;  ///< all of the engine, by target rank of the plan
  friend bool operator==(const ExcludeCommand&, const ExcludeCommand&) = default;
};
using Command = std::variant<PrepareCommand, TransferCommand, ReleaseCommand, CommitCommand,
                             CommittedEverywhereCommand, AbortCommand, EvictCommand, StaleCommand,
                             HashCommand, ExcludeCommand>;

// ---- agent → coordinator --------------------------------------------------------------------

/// What one rank did for an epoch, for people; nothing is decided by it. Times are of its agent's
/// clock.
struct Span {
  std::string name;  ///< prepare, serve, pack, stage, read, verify, swap or drain
  int64_t begin_us = 0;
  int64_t duration_us = 0;
  int64_t bytes = 0;
  ParticipantId source{};  ///< read: who was read from
  std::string transport;   ///< read
  friend bool operator==(const Span&, const Span&) = default;
};
/// Of one report.
inline constexpr size_t kSpansMax = 64;

struct PreparedReport {
  Epoch epoch{};
  Member member;
  Contents holds =
      {};  ///< target: what it holds beside what it serves, also while this epoch moves
  std::vector<Span> spans = {};
  friend bool operator==(const PreparedReport&, const PreparedReport&) = default;
};
/// One stream's digest, as in transfer::StreamDigest.
struct Digest {
  PlanId plan;
  uint32_t stream = 0;
  uint64_t digest = 0;
  friend auto operator<=>(const Digest&, const Digest&) = default;
};
struct SourceDoneReport {
  Epoch epoch{};
  Member member;
  std::vector<Digest> digests;
  std::vector<Span> spans = {};
  friend bool operator==(const SourceDoneReport&, const SourceDoneReport&) = default;
};
struct StagedReport {
  Epoch epoch{};
  Member member;
  std::vector<Digest> digests;
  int64_t bytes = 0;
  std::map<std::string, int64_t> bytes_by_transport;
  uint32_t rereads = 0;
  double seconds = 0;      ///< from TransferCommand to verified
  int64_t bytes_kept = 0;  ///< of `bytes`: not read, because they were there
  /// What it holds beside this epoch once that is installed, what it serves now among it. Nothing
  /// with one buffer.
  Contents keeps = {};
  std::vector<Span> spans = {};
  DeltaFigures delta = {};  ///< `code_bytes` are part of bytes_by_transport
  friend bool operator==(const StagedReport&, const StagedReport&) = default;
};
/// Sent by the leader's agent once: all ranks of the engine serve `epoch`.
struct SwappedReport {
  Epoch epoch{};
  Member member;
  double flip_seconds = 0;
  std::vector<Span> spans = {};
  friend bool operator==(const SwappedReport&, const SwappedReport&) = default;
};
struct DrainedReport {
  Epoch epoch{};
  Member member;
  std::vector<Span> spans = {};
  friend bool operator==(const DrainedReport&, const DrainedReport&) = default;
};
struct FailedReport {
  Epoch epoch{};
  Member member;
  Status why;
  /// Sent by the leader's agent: the application does not want what was committed, and is back on
  /// what it served.
  bool refused = false;
  friend bool operator==(const FailedReport&, const FailedReport&) = default;
};
/// The process behind the member has ended (its socket closed), or it detached in good order.
struct LostReport {
  Member member;
  Status why;
  friend bool operator==(const LostReport&, const LostReport&) = default;
};
/// Of bytes that nothing has begun to write between the first and the last one that was read; else
/// `why` says so, and there are no sums.
struct HashedReport {
  Epoch epoch{};  ///< HashCommand::content
  Member member;
  uint64_t verification = 0;
  Status why;
  std::vector<std::array<uint64_t, 2>> sums;  ///< of each op of the slice, in its order
  double seconds = 0;
  friend bool operator==(const HashedReport&, const HashedReport&) = default;
};
using Report = std::variant<PreparedReport, SourceDoneReport, StagedReport, SwappedReport,
                            DrainedReport, FailedReport, LostReport, HashedReport>;

}  // namespace weightwire::epoch
