#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/content/hash_plan.h"

namespace weightwire::coordinator {

struct EngineContent {
  std::string name;
  Epoch epoch{};  ///< under which the bytes that it serves were committed
  Version version{};
  Status why;               ///< not OK: it could not be read
  bool superseded = false;  ///< because another epoch took over meanwhile
  layout::Fingerprint content_class;
  layout::Fingerprint root;
  uint64_t tensors = 0;          ///< below the root
  uint64_t tensors_partial = 0;  ///< not held whole: compared among its ranks only
  int64_t bytes = 0;             ///< read, replicas included
  double seconds = 0;            ///< of the slowest rank
};
struct ContentDifference {
  std::string engine;
  std::vector<uint32_t> ranks;  ///< those that hold what differs
  std::string tensor;
  std::string text;
};
struct IntegrityReport {
  bool equal = false;  ///< every engine could be read and nothing differs
  std::vector<EngineContent> engines;
  std::vector<ContentDifference> differences;  ///< the first kDifferencesMax
  uint64_t differences_total = 0;
  double seconds = 0;

  static constexpr size_t kDifferencesMax = 100;
  void Add(ContentDifference difference);
};

/// What one engine's ranks answered.
struct EngineAnswer {
  EngineContent engine;
  std::shared_ptr<const content::HashPlan> hash_plan;  ///< null: never made
  std::vector<std::vector<kernels::KeyedSum>> sums;    ///< by rank; complete when engine.why is OK
};

/// What is known of a committed epoch's content, of each class that was seen without a difference.
using Leaves = std::shared_ptr<const std::vector<content::Leaf>>;
using KnownContent = std::map<layout::Fingerprint, Leaves>;

/// Compares replicas within each engine, tensors of one epoch among engines, and with what is
/// `known` of that epoch, which is then what is right; else most engines are, and of equally many
/// the first. Tensors are compared only where name, dtype and shape agree. Pure.
IntegrityReport Compare(const std::vector<EngineAnswer>& answers,
                        const std::map<Epoch, KnownContent>& known,
                        std::map<Epoch, KnownContent>* found);

}  // namespace weightwire::coordinator
