#include "tests/sim/drains.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>

namespace weightwire::sim {

using coordinator::Coordinator;
using Draining = Coordinator::Draining;

Drains::Drains(Fleet& fleet, Reached& reached) : fleet_(fleet), reached_(reached) {
  fleet_.on_command = [this](const Node& node, const epoch::Command& command) {
    OnCommand(node, command);
  };
  for (auto& node : fleet_.nodes()) {
    const auto lost = [this, name = node->name()] {
      std::erase_if(marks_, [&](const Mark& mark) { return mark.at.contains(name); });
    };
    node->port().on_session_over = lost;
    node->on_killed.push_back(lost);
  }
}

bool Drains::IsAgent(const std::string& name) const {
  return std::ranges::any_of(fleet_.nodes(),
                             [&](const auto& node) { return node->name() == name; });
}

std::vector<Drains::Mark> Drains::MarksOf(const std::string& name) const {
  const auto status = fleet_.coordinator()->Snapshot();
  std::map<std::string, Mark> engines;
  for (const auto& rank : status.participants) {
    if (rank.role != control::GroupRole::kEngine) continue;
    Mark& mark = engines[rank.group];
    mark.name = rank.group;
    mark.life = fleet_.engine(rank.group).lives();
    mark.at.insert(rank.agent_name);
    mark.ranks.insert(rank.member.incarnation);
  }
  std::vector<Mark> marks;
  for (auto& [engine, mark] : engines) {
    if (engine == name || mark.at.contains(name)) marks.push_back(std::move(mark));
  }
  return marks;
}

void Drains::Drain(const std::string& name) {
  std::vector<Mark> marks = MarksOf(name);
  if (IsAgent(name) && fleet_.node(name).alive()) marks.push_back({.name = name, .at = {name}});
  for (Mark& mark : marks) {
    mark.question = question_ + 1;
    marks_.push_back(std::move(mark));
  }
  Ask(name, Draining::kDrain);
}

/// An engine that takes part again does so at every agent, drained ones among them.
void Drains::Undo(const std::string& name) {
  std::set<std::string> undone = {name};
  for (const Mark& mark : MarksOf(name)) {
    undone.insert(mark.name);
    undone.insert(mark.at.begin(), mark.at.end());
  }
  std::erase_if(marks_, [&](const Mark& mark) { return undone.contains(mark.name); });
  Ask(name, Draining::kUndo);
}

void Drains::Ask(const std::string& name, Draining what) {
  asked_.insert(name);
  answered_ = false;
  fleet_.coordinator()->Drain(name, what, Coordinator::DrainOf::kEngineOrAgent,
                              [this, what, question = ++question_](const auto& engines) {
                                Answered(question, what, engines.has_value());
                              });
}

void Drains::Answered(uint64_t question, Draining what, bool ok) {
  if (fleet_.coordinator() == nullptr) return;  // the answer went with it
  answered_ |= question == question_;
  reached_.Count(what == Draining::kDrain ? "drains" : "drains taken back", ok);
  for (Mark& mark : marks_) {
    if (mark.question == question && ok) Tell(mark);
  }
  std::erase_if(marks_, [&](const Mark& mark) { return mark.question == question && !ok; });
}

void Drains::Tell(Mark& mark) {
  mark.told = true;
  for (const auto& epoch : fleet_.coordinator()->Snapshot().epochs) {
    mark.newest = std::max(mark.newest, epoch.epoch);
  }
  if (IsAgent(mark.name)) return;
  const Rollout& engine = fleet_.engine(mark.name);
  const auto status = fleet_.StatusOf(mark.name);
  if (engine.served() && status.state == coordinator::EngineState::kServing &&
      status.busy_with.empty()) {
    mark.served = engine.served()->content;
  }
}

void Drains::OnCommand(const Node& node, const epoch::Command& command) {
  if (marks_.empty()) return;
  if (const auto* evict = std::get_if<epoch::EvictCommand>(&command)) {
    std::erase_if(marks_,
                  [&](const Mark& mark) { return mark.ranks.contains(evict->member.incarnation); });
  }
  const auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
  if (prepare == nullptr) return;
  // (An agent may be drained before a rank of the trainer comes there, which takes part.)
  if (prepare->kind == epoch::Kind::kPublish && prepare->role == epoch::Role::kSource) return;
  for (const Mark& mark : marks_) {
    const bool of_it = mark.ranks.empty() ? mark.at.contains(node.name())
                                          : mark.ranks.contains(prepare->member.incarnation);
    if (!of_it || !Lives(mark) || !mark.told || prepare->epoch <= mark.newest) continue;
    ADD_FAILURE() << "epoch " << prepare->epoch.value << " has a part for " << mark.name
                  << ", which an operator was told is drained after epoch " << mark.newest.value;
  }
}

bool Drains::Lives(const Mark& mark) const {
  return IsAgent(mark.name) || fleet_.engine(mark.name).lives() == mark.life;
}

bool Drains::any() const {
  return std::ranges::any_of(marks_, [this](const Mark& mark) { return mark.told && Lives(mark); });
}

void Drains::ExpectServing() const {
  for (const Mark& mark : marks_) {
    if (!mark.served || !Lives(mark)) continue;
    const Rollout& engine = fleet_.engine(mark.name);
    EXPECT_TRUE(engine.served() && engine.served()->content == *mark.served)
        << mark.name << " was drained, and does not serve epoch " << mark.served->value << " on";
  }
}

bool Drains::AllAreBack() const {
  if (fleet_.coordinator() == nullptr) return false;
  const auto status = fleet_.coordinator()->Snapshot();
  return status.agents == fleet_.nodes().size() &&
         status.engines.size() == fleet_.engines().size() &&
         std::ranges::all_of(status.engines, [](const auto& engine) {
           return engine.ranks_present == engine.world_size;
         });
}

void Drains::UndoAll() {
  for (int tenths = 0; tenths < 300 && !AllAreBack(); ++tenths) {
    fleet_.RunFor(std::chrono::milliseconds(100));
  }
  ASSERT_TRUE(AllAreBack()) << "an agent or engine never came back";
  ExpectServing();
  for (const std::string& name : std::set(asked_)) {
    Undo(name);
    ASSERT_TRUE(fleet_.RunUntil([this] { return answered_; }, std::chrono::seconds(5))) << name;
  }
  for (const auto& engine : fleet_.coordinator()->Snapshot().engines) {
    EXPECT_FALSE(engine.drained) << engine.name << " is drained, and nobody can take it back";
  }
}

}  // namespace weightwire::sim
