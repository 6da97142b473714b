#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/base/clock.h"
#include "server/coordinator/membership.h"
#include "server/epoch/messages.h"

namespace weightwire::coordinator {

/// An engine that has staged what is decided, and has not swapped to it: its epoch ended without
/// it, its agent was cut off, or a coordinator that is gone began that epoch. It serves on, nothing
/// new is asked of it before its leader answers, and then it is filled with what is newer.
struct Straggler {
  std::vector<epoch::Member> ranks;
  Epoch epoch{};
  epoch::Content content;
  std::map<epoch::Member, epoch::Contents> keeps;  ///< what it holds when it has swapped, beside it
  /// What is new waits for it until then, and not again when it was cut off meanwhile.
  Nanos patience{};
  uint64_t turn = 0;  ///< Stragglers sets it: another one for each Put
};

/// A plain value: no calls out.
class Stragglers {
 public:
  /// Whether the engine is one, and all there.
  bool Has(const Group& engine) const {
    const Straggler* straggler = Find(engine.name);
    return straggler != nullptr && engine.Complete() && straggler->ranks == engine.Members();
  }
  /// Also of one that is cut off. Null when the engine of that name is none.
  const Straggler* Find(const std::string& engine) const {
    const auto found = by_engine_.find(engine);
    return found == by_engine_.end() ? nullptr : &found->second;
  }
  const Straggler& Put(const std::string& engine, Straggler straggler) {
    straggler.turn = ++turns_;
    return by_engine_[engine] = std::move(straggler);
  }
  void Erase(const std::string& engine) { by_engine_.erase(engine); }
  const std::map<std::string, Straggler>& all() const { return by_engine_; }

 private:
  std::map<std::string, Straggler> by_engine_;
  uint64_t turns_ = 0;
};

}  // namespace weightwire::coordinator
