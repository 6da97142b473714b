#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/base/executor.h"
#include "server/coordinator/cancel_token.h"
#include "server/coordinator/work.h"

namespace weightwire::coordinator {

/// Work::Scheme on the workers, once for each (config.json, spec): ranks that ask while
/// it is being computed wait for the same answer. Keeps the most recent few. Strand only.
class SchemeCache {
 public:
  using Ready = std::function<void(const Result<SchemeLayout>&)>;
  SchemeCache(Executor& strand, Executor& workers, std::shared_ptr<const Work> work)
      : strand_(strand), workers_(workers), work_(std::move(work)) {}
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
  const std::shared_ptr<const Work> work_;
  std::map<Key, Entry> entries_;
  std::deque<Key> order_;  ///< of finished entries, oldest first
  CancelToken cancel_;
};

}  // namespace weightwire::coordinator
