#include "tests/sim/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace weightwire::sim {

using coordinator::CommitRecord;
using coordinator::VersionId;

void Ledger::ForEach(const std::function<void(const CommitRecord&)>& visit) const {
  for (const auto& record : journal_.durable()) {
    if (const auto* commit = std::get_if<CommitRecord>(&record)) visit(*commit);
  }
}

std::optional<VersionId> Ledger::CommittedAs(Epoch epoch, Version version) const {
  std::optional<VersionId> found;
  ForEach([&](const CommitRecord& commit) {
    if (commit.epoch != epoch || commit.version != version) return;
    found = commit.held == Epoch{} ? VersionId{commit.lineage, version}
                                   : CommittedAs(commit.held, version);
  });
  return found;
}

bool Ledger::RolledBack(Epoch after, Epoch upto) const {
  bool found = false;
  ForEach([&](const CommitRecord& commit) {
    found |= commit.held != Epoch{} && commit.epoch > after && commit.epoch <= upto;
  });
  return found;
}

uint64_t Ledger::newest_lineage() const {
  uint64_t newest = coordinator::kFirstLineage;
  ForEach([&](const CommitRecord& commit) { newest = std::max(newest, commit.lineage); });
  return newest;
}

uint64_t Ledger::of_later_lineages() const {
  uint64_t versions = 0;
  ForEach([&](const CommitRecord& commit) {
    versions += commit.held == Epoch{} && commit.lineage > coordinator::kFirstLineage;
  });
  return versions;
}

void Ledger::ExpectMayFollow(const CommitRecord& record) const {
  const std::string what = "COMMIT(" + std::to_string(record.epoch.value) + ") of " +
                           coordinator::ToString(VersionId{record.lineage, record.version});
  const uint64_t newest = newest_lineage();
  EXPECT_EQ(record.newest, std::max(newest, record.lineage)) << what << " forgets a lineage";
  if (record.held != Epoch{}) {
    const auto held = CommittedAs(record.held, record.version);
    EXPECT_TRUE(held) << what << " goes back to what was never committed";
    EXPECT_TRUE(!held || held->lineage == record.lineage)
        << what << " goes back to " << coordinator::ToString(*held);
    return;
  }
  EXPECT_GE(record.lineage, newest) << what << " is of a trainer that was overtaken";
  VersionId last{0, {}};
  ForEach([&](const CommitRecord& commit) { last = {commit.lineage, commit.version}; });
  EXPECT_TRUE(last.lineage != record.lineage || last.version < record.version)
      << what << " after " << coordinator::ToString(last);
}

}  // namespace weightwire::sim
