#pragma once

#include <map>
#include <string>
#include <vector>

#include "server/coordinator/membership.h"

namespace weightwire::coordinator {

/// What one version, or one rollback, waits for.
struct AwaitedModel {
  std::string name;
  Nanos until{};   ///< when it goes on without an engine of the model
  Nanos latest{};  ///< when it waits for no model any more; 0: it has not waited yet
  bool IsAwaited(Nanos now) const { return now < until; }
};

/// Models of a trainer that publishes several, of which no engine can take part right now although
/// one may soon. An engine gets a model it has missed from another engine that holds it: a version
/// that is committed without all engines of a model leaves them behind until the next one, while
/// the engines of the other models serve it. So it waits for them, for the time in which engines
/// come back: one lease since they were cut off, or since this coordinator took over from another
/// one. Strand only.
class AbsentModels {
 public:
  /// Any model may come back until then.
  explicit AbsentModels(Nanos all_until) : all_until_(all_until) {}
  /// The engine may come back until then; any model, where its layout is not agreed.
  void CutOff(const Group& engine, Nanos until);

  /// Whether to wait for a model of the trainer that none of `engines` holds. Of one that comes and
  /// goes for no longer than `longest`. Never of a trainer that has one model only.
  bool Awaits(const Group& trainer, const std::vector<const Group*>& engines, Nanos now,
              Nanos longest, AwaitedModel& awaited) const;

 private:
  Nanos all_until_;
  std::map<std::string, Nanos> until_;
};

}  // namespace weightwire::coordinator
