#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/coordinator/cancel_token.h"
#include "server/coordinator/decisions.h"
#include "server/epoch/coordinator_machine.h"

namespace weightwire::coordinator {

/// An engine that has staged what is decided, and has not swapped to it: its epoch ended without
/// it, its agent was cut off, or a coordinator that is gone began that epoch. It serves on, nothing
/// new is asked of it before its leader answers, and then it is filled with what is newer.
struct Straggler {
  std::vector<epoch::Member> ranks;
  Epoch epoch{};
  epoch::Content content;
  std::map<epoch::Member, epoch::Contents> keeps;  ///< what it holds beside, when it has swapped
  /// What is new waits for it until then, and not again when it was cut off meanwhile.
  Nanos patience{};
  uint64_t turn = 0;  ///< another one for each time that it is put down as one
};

/// Who is yet to swap: asked once more every commit_deadline, and never evicted for being late.
class Stragglers {
 public:
  /// `patience_over` runs when something new may have waited long enough for one.
  Stragglers(const Services& services, const Decisions& decisions,
             std::function<void()> patience_over)
      : s_(services), decisions_(decisions), patience_over_(std::move(patience_over)) {}

  /// Whether the engine is one, and all there.
  bool Has(const Group& engine) const;
  /// Also of one that is cut off. Null when the engine of that name is none.
  const Straggler* Find(const std::string& engine) const;
  /// It has been asked, or cannot be reached to be asked.
  void Put(const std::string& engine, Straggler straggler);
  /// It is asked now, or when its content is durable.
  void AwaitSwap(const std::string& engine, Straggler straggler);
  void OnDurable(Epoch content);
  void Erase(const std::string& engine) { by_engine_.erase(engine); }
  /// True when it is the answer of one: it has swapped, or is evicted.
  bool OnReport(const epoch::Report& report);
  /// What is new waits for it still.
  bool IsAwaited(const Group& engine) const;
  bool AnyAwaited() const;

  /// COMMIT to every rank of an engine.
  void SendCommits(const std::vector<epoch::Member>& ranks, Epoch epoch,
                   const epoch::Content& content) const;
  /// The engine has swapped to `content`, and is no straggler.
  void Install(const epoch::EngineMembers& engine, Epoch epoch, const epoch::Content& content,
               const std::map<epoch::Member, epoch::Contents>& keeps);

 private:
  void Ask(const Straggler& straggler) const;
  void RemindLater(const std::string& engine, uint64_t turn);

  Services s_;
  const Decisions& decisions_;
  std::function<void()> patience_over_;
  std::map<std::string, Straggler> by_engine_;
  uint64_t turns_ = 0;
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
