#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "server/coordinator/journal.h"
#include "tests/support/memory_journal.h"

namespace weightwire::sim {

/// What was decided, by every record that was ever durable: more than any coordinator reads.
class Ledger {
 public:
  explicit Ledger(const testing::MemoryJournal& journal) : journal_(journal) {}

  /// As what the bytes were published that were committed under the epoch with this version;
  /// nothing: no such COMMIT is durable.
  std::optional<coordinator::VersionId> CommittedAs(Epoch epoch, Version version) const;
  bool Committed(Epoch epoch, Version version) const {
    return CommittedAs(epoch, version).has_value();
  }
  /// A rollback was decided after the first epoch, up to the other one.
  bool RolledBack(Epoch after, Epoch upto) const;
  /// The newest lineage of which a version is committed; 1: of none.
  uint64_t newest_lineage() const;
  /// Versions that were committed of a later lineage than the first.
  uint64_t of_later_lineages() const;
  /// I8, of a COMMIT that is about to be submitted: a version is of the newest lineage, above the
  /// last one that was committed of it, or of a later lineage; bytes that are gone back to are of
  /// the lineage that the record says.
  void ExpectMayFollow(const coordinator::CommitRecord& record) const;

 private:
  void ForEach(const std::function<void(const coordinator::CommitRecord&)>& visit) const;
  const testing::MemoryJournal& journal_;
};

}  // namespace weightwire::sim
