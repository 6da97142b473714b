#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/lifeline.h"
#include "server/layout/scheme.h"

namespace weightwire::coordinator {

/// What a scheme says about a model, with the fingerprint of the canonical space.
struct SchemeLayout {
  std::shared_ptr<const layout::ModelLayout> model;
  std::shared_ptr<const layout::CanonicalSpace> canonical;
  layout::Fingerprint canonical_fingerprint;
};

/// layout::LayoutFromScheme on the workers, once for each (config.json, spec): ranks that ask while
/// it is being computed wait for the same answer. Keeps the most recent few. Strand only.
class SchemeCache {
 public:
  using Ready = std::function<void(const Result<SchemeLayout>&)>;
  SchemeCache(Executor& strand, Executor& workers) : strand_(strand), workers_(workers) {}
  /// `ready` runs later, on the strand. Failures are not kept.
  void Get(const std::string& config_json, const std::string& spec, Ready ready);

 private:
  using Key = std::pair<std::string, std::string>;
  struct Entry {
    std::vector<Ready> waiting;
    std::shared_ptr<const Result<SchemeLayout>> result;
  };
  void Finish(const Key& key, std::shared_ptr<const Result<SchemeLayout>> result);

  Executor& strand_;
  Executor& workers_;
  std::map<Key, Entry> entries_;
  std::deque<Key> order_;  ///< of finished entries, oldest first
  Lifeline lifeline_;
};

}  // namespace weightwire::coordinator
