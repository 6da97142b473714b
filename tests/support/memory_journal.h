#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/journal.h"

namespace weightwire::testing {

/// A journal in memory that outlives its coordinators. An append becomes durable `delay` after the
/// call, in order; a crash in between may lose it, but never one before another. Not thread-safe.
class MemoryJournal final : public coordinator::Journal {
 public:
  explicit MemoryJournal(Executor& strand, Nanos delay = Nanos{0})
      : strand_(strand), delay_(delay) {}

  void Append(coordinator::JournalRecord record, std::function<void(Status)> done) override {
    if (before_append) before_append(record);
    pending_.emplace_back(std::move(record), std::move(done));
    strand_.PostAfter(delay_, [this, life = life_] {
      if (life != life_) return;
      if (hindered_.ok()) return Settle();
      ++waiting_;
      if (tell_) tell_(hindered_);
    });
  }
  void OnHindered(std::function<void(Status)> tell) override { tell_ = std::move(tell); }
  Result<std::vector<coordinator::JournalRecord>> Read() override {
    std::map<size_t, size_t> newest;
    for (size_t i = 0; i < durable_.size(); ++i) newest[durable_[i].index()] = i;
    std::vector<coordinator::JournalRecord> records;
    for (const auto& [kind, at] : newest) records.push_back(durable_[at]);
    return records;
  }

  /// Appends wait from now on; `why` is told when there is one.
  void Hinder(Status why) { hindered_ = std::move(why); }
  /// Those that wait go on.
  void Relent() {
    hindered_ = OkStatus();
    const size_t waiting = std::exchange(waiting_, 0);
    for (size_t i = 0; i < waiting; ++i) Settle();
    if (tell_ && waiting > 0) tell_(OkStatus());
  }
  /// Somebody deletes the decisions above `epoch`.
  void ForgetCommitsAbove(Epoch epoch) {
    std::erase_if(durable_, [&](const auto& record) {
      const auto* commit = std::get_if<coordinator::CommitRecord>(&record);
      return commit != nullptr && commit->epoch > epoch;
    });
  }

  /// The coordinator is gone: nobody is answered. The first `kept` of the appends under way are
  /// durable all the same, the others are lost.
  void Crash(size_t kept) {
    ++life_;
    tell_ = nullptr;
    waiting_ = 0;
    for (size_t i = 0; i < std::min(kept, pending_.size()); ++i) {
      durable_.push_back(std::move(pending_[i].first));
    }
    pending_.clear();
  }
  /// The next append fails; its record is kept or lost, as the caller cannot know.
  void FailNext(bool kept) { failure_ = kept ? Failure::kKept : Failure::kLost; }
  void StopFailing() { failure_ = Failure::kNone; }

  size_t pending() const { return pending_.size(); }
  const std::vector<coordinator::JournalRecord>& durable() const { return durable_; }
  bool Committed(Epoch epoch) const {
    return std::any_of(durable_.begin(), durable_.end(), [&](const auto& record) {
      const auto* commit = std::get_if<coordinator::CommitRecord>(&record);
      return commit != nullptr && commit->epoch == epoch;
    });
  }

  /// Called with each record when its append is asked for.
  std::function<void(const coordinator::JournalRecord&)> before_append;

 private:
  enum class Failure { kNone, kKept, kLost };

  void Settle() {
    auto [record, done] = std::move(pending_.front());
    pending_.pop_front();
    const Failure failure = std::exchange(failure_, Failure::kNone);
    if (failure != Failure::kLost) durable_.push_back(std::move(record));
    done(failure == Failure::kNone
             ? OkStatus()
             : Status(Code::kUnavailable, Reason::kJournalFailed, "injected failure"));
  }

  Executor& strand_;
  const Nanos delay_;
  uint64_t life_ = 0;
  Failure failure_ = Failure::kNone;
  std::function<void(Status)> tell_;
  Status hindered_;
  size_t waiting_ = 0;
  std::deque<std::pair<coordinator::JournalRecord, std::function<void(Status)>>> pending_;
  std::vector<coordinator::JournalRecord> durable_;
};

}  // namespace weightwire::testing
