#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/sim/fleet.h"
#include "tests/sim/reached.h"

namespace weightwire::sim {

/// What operators were told of drains, and the invariant that it holds (I7): from the answer on an
/// engine that is drained, and whatever comes to an agent that is, gets no part in an epoch that
/// begins later, on either side, whichever coordinator runs; and it serves on. Until an operator
/// asks to take it back, or a coordinator that runs loses it.
///
/// Who is lost it knows by what a coordinator says to agents, not by its journal.
class Drains {
 public:
  /// Outlives the fleet, which calls it. Checks from now on.
  Drains(Fleet& fleet, Reached& reached);
  Drains(const Drains&) = delete;

  /// Of an engine or agent. A coordinator must run; its answer comes later, or never.
  void Drain(const std::string& name);
  void Undo(const std::string& name);
  /// Waits until everybody is back, and undoes all.
  void UndoAll();
  /// The newest question is answered.
  bool answered() const { return answered_; }
  /// Somebody is drained, and an operator knows.
  bool any() const;
  const std::set<std::string>& asked() const { return asked_; }
  void ExpectServing() const;

 private:
  struct Mark {
    std::string name;                  ///< of an engine, or an agent
    std::set<std::string> at;          ///< agents
    std::set<Incarnation> ranks = {};  ///< of the engine; of an agent none: whoever comes there
    uint64_t question = 0;
    bool told = false;
    Epoch newest{};                    ///< that had begun when the operator was told
    uint64_t life = 0;                 ///< of the engine, when it was asked for
    std::optional<Epoch> served = {};  ///< then, when nothing was to change it any more
  };
  void Ask(const std::string& name, coordinator::Coordinator::Draining what);
  void Answered(uint64_t question, coordinator::Coordinator::Draining what, bool ok);
  void Tell(Mark& mark);
  void OnCommand(const Node& node, const epoch::Command& command);
  bool AllAreBack() const;
  /// No rank of it has ended: an engine that is partly another one is another one, and a
  /// coordinator that starts cannot know which ranks were there together.
  bool Lives(const Mark& mark) const;
  bool IsAgent(const std::string& name) const;
  /// Every engine that the name stands for, by what the coordinator knows now.
  std::vector<Mark> MarksOf(const std::string& name) const;

  Fleet& fleet_;
  Reached& reached_;
  std::vector<Mark> marks_;
  std::set<std::string> asked_;
  uint64_t question_ = 0;
  bool answered_ = true;
};

}  // namespace weightwire::sim
