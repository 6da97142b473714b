#include "tests/sim/reached.h"

#include <gtest/gtest.h>

#include <istream>
#include <ostream>

namespace weightwire::sim {

void Reached::Count(const coordinator::EpochStatus& epoch) {
  const bool committed = epoch.phase == epoch::Phase::kCommitted;
  const bool aborted = epoch.phase == epoch::Phase::kAborted;
  if (aborted) Count("aborted for " + std::string(ReasonName(epoch.why.reason())));
  if (epoch.kind == epoch::Kind::kRollback) {
    Count("rollbacks", committed);
    Count("rollbacks that did not come about", aborted);
  } else if (epoch.kind == epoch::Kind::kFill) {
    Count("fills", committed);
    Count("fills dropped", aborted);
  } else {
    Count("commits", committed);
    Count("versions committed that were made of what changed", committed && epoch.delta.bytes > 0);
    Count("versions committed without a laggard", committed && !epoch.left_out.empty());
    Count("versions whose first attempt went on without an engine",
          committed && epoch.attempt == 1 && !epoch.left_out.empty());
    Count("aborts", aborted);
    Count("retries", epoch.attempt > 1);
  }
}

void Reached::Write(std::ostream& out) const {
  for (const auto& [what, times] : counts_) out << times << ' ' << what << '\n';
}

void Reached::Read(std::istream& in) {
  uint64_t times = 0;
  for (std::string what; in >> times && std::getline(in >> std::ws, what);) Count(what, times);
}

void Reached::ExpectAll() const {
  const auto expect = [this](const std::string& what) {
    const auto found = counts_.find(what);
    EXPECT_TRUE(found != counts_.end() && found->second > 0) << "never reached: " << what;
  };
  for (const char* what : {"commits",
                           "aborts",
                           "retries",
                           "fills",
                           "fills dropped",
                           "coordinator crashes",
                           "records that only the crashed coordinator's disk knew",
                           "journal failures",
                           "trainer evictions",
                           "ends of engines",
                           "ranks that read from another engine",
                           "ranks that dropped a reader",
                           "versions whose first attempt went on without an engine",
                           "buffers given up for the next version",
                           "engines that outlived a coordinator",
                           "engines that did not fit the next coordinator's journal",
                           "rollbacks",
                           "rollbacks that did not come about",
                           "versions committed without a laggard",
                           "versions taken back because an engine refused them",
                           "versions not moved",
                           "versions committed that were made of what changed",
                           "cuts of all nodes",
                           "cuts of some nodes",
                           "versions that a publisher withdrew",
                           "trainers that went back to an earlier step",
                           "versions of trainers that were overtaken",
                           "versions committed of a later lineage"}) {
    expect(what);
  }
  for (const char* what :
       {"drains", "drains taken back", "coordinators crashed with somebody drained"}) {
    expect(what);
  }
  for (Reason reason : {Reason::kMemberLost, Reason::kDeadlineExceeded, Reason::kTransportFailed,
                        Reason::kDigestMismatch, Reason::kAbortRequested, Reason::kStaleEpoch}) {
    expect("aborted for " + std::string(ReasonName(reason)));
  }
  for (epoch::Phase phase :
       {epoch::Phase::kPreparing, epoch::Phase::kTransferring, epoch::Phase::kCommitting,
        epoch::Phase::kCommitted, epoch::Phase::kAborting, epoch::Phase::kAborted}) {
    expect("coordinators crashed in " + std::string(epoch::PhaseName(phase)));
    expect("cuts in " + std::string(epoch::PhaseName(phase)));
  }
}

}  // namespace weightwire::sim
