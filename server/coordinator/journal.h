#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"

namespace weightwire::coordinator {

/// The decision: these engines are required to serve `epoch`.
struct CommitRecord {
  Epoch epoch{};
  Version version{};
  std::vector<std::string> engines;
  /// The epoch under which the bytes were published: an earlier one for a rollback, else 0.
  Epoch held{};
  friend bool operator==(const CommitRecord&, const CommitRecord&) = default;
};
/// No epoch ≥ `limit` was handed out by anyone who could not append this.
struct ReserveRecord {
  Epoch limit{};
  History history{};  ///< of this journal; 0 in records from before there was one
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

/// The durable log of decisions. Implemented by store/.
class Journal {
 public:
  virtual ~Journal() = default;
  /// `done` runs once, later, on the coordinator's strand: OK when the record survives any crash;
  /// a failure means that its fate is unknown. Appends are made durable in the order of the calls.
  virtual void Append(JournalRecord record, std::function<void(Status)> done) = 0;
  /// Everything that is durable, oldest first. Called once, at start.
  virtual Result<std::vector<JournalRecord>> Read() = 0;
};

}  // namespace weightwire::coordinator
