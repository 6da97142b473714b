#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"

namespace weightwire::coordinator {

/// Which engines a decision is about, in 12 bytes however many there are: what a member needs to go
/// on it brings itself.
struct EngineSum {
  uint32_t count = 0;
  uint64_t digest = 0;  ///< of their names, in the order in which they were added

  EngineSum() = default;
  EngineSum(std::initializer_list<std::string_view> names) {
    for (const std::string_view name : names) Add(name);
  }
  void Add(std::string_view name) {
    if (count++ == 0) digest = 0xcbf29ce484222325;  // FNV-1a; a byte that no name has ends each
    for (const char c : name) Mix(static_cast<uint8_t>(c));
    Mix(0xff);
  }
  friend bool operator==(const EngineSum&, const EngineSum&) = default;

 private:
  void Mix(uint8_t byte) { digest = (digest ^ byte) * 0x100000001b3; }
};
inline constexpr uint64_t kFirstLineage = 1;
/// Where a version stands in the order of all versions of a job. A trainer that goes back to an
/// earlier step begins a new lineage: its versions come after all of the ones before, whatever
/// their numbers.
struct VersionId {
  uint64_t lineage = kFirstLineage;  ///< 0: not known
  Version version{};
  friend auto operator<=>(const VersionId&, const VersionId&) = default;
};
/// "version 7", and " of lineage 2" where it is not the first.
inline std::string ToString(const VersionId& id) {
  std::string text = "version " + std::to_string(id.version.value);
  if (id.lineage != kFirstLineage) text += " of lineage " + std::to_string(id.lineage);
  return text;
}
/// What was committed from this epoch on, until the next run, is of this lineage; 0: not known.
struct LineageRun {
  Epoch from{};
  uint64_t lineage = 0;
  friend bool operator==(const LineageRun&, const LineageRun&) = default;
};
/// Of epochs before so many changes of lineage it is not known any more of which they are.
inline constexpr size_t kLineageRunsMax = 16;
/// The decision: these engines are required to serve `epoch`.
struct CommitRecord {
  Epoch epoch{};
  Version version{};
  EngineSum engines;
  /// The epoch under which the bytes were published: an earlier one for a rollback, else 0.
  Epoch held{};
  uint64_t lineage = kFirstLineage;  ///< of the bytes; 0: of a rollback to one that is not known
  /// The highest lineage that was ever committed: another one than `lineage` after a rollback to an
  /// earlier one. Whoever publishes versions of a lower one is refused.
  uint64_t newest = kFirstLineage;
  /// Of this epoch and those before it, rising, at most kLineageRunsMax; empty with one lineage,
  /// and in records from before there were any.
  std::vector<LineageRun> runs = {};
  friend bool operator==(const CommitRecord&, const CommitRecord&) = default;
};
/// No epoch ≥ `limit` was handed out by anyone who could not append this.
struct ReserveRecord {
  Epoch limit{};
  JournalId history{};  ///< of this journal; 0 in records from before there was one
  friend bool operator==(const ReserveRecord&, const ReserveRecord&) = default;
};
/// Whom an operator has drained: an engine by its name and one of its ranks' incarnations, or an
/// agent by its own. It means nothing once that incarnation has left.
struct DrainMark {
  std::string name;
  Incarnation incarnation{};
  friend auto operator<=>(const DrainMark&, const DrainMark&) = default;
};
/// All marks that there are from now on.
struct DrainRecord {
  std::vector<DrainMark> marks;
  friend bool operator==(const DrainRecord&, const DrainRecord&) = default;
};
using JournalRecord = std::variant<CommitRecord, ReserveRecord, DrainRecord>;

/// The most bytes of one record; a longer one is refused before anything is written.
inline constexpr size_t kRecordBytesMax = 1 << 20;

/// The durable log of decisions. Implemented by store/.
class Journal {
 public:
  virtual ~Journal() = default;
  /// `done` runs once, later, on the coordinator's strand: OK when the record survives any crash;
  /// a failure means that its fate is unknown and that no append will succeed any more, but for
  /// kInvalidArgument / kMessageTooLarge: over kRecordBytesMax, and nothing was written. Appends
  /// are made durable in the order of the calls. What may pass (a full disk, a server that does not
  /// answer) is no failure: the append goes on until it is durable, and `OnHindered` says why.
  virtual void Append(JournalRecord record, std::function<void(Status)> done) = 0;
  /// `tell` runs on the coordinator's strand: why the append under way does not become durable; OK
  /// when it has. At most one, set before the first append.
  virtual void OnHindered(std::function<void(Status)> tell) = 0;
  /// The newest record of each kind, in the order in which they were appended as far as that is
  /// known: a decision stands for all before it. Called once, at start.
  virtual Result<std::vector<JournalRecord>> Read() = 0;
};

}  // namespace weightwire::coordinator
