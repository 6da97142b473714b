#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

#include "server/metrics/metrics.h"

namespace weightwire::load {

/// Says when epochs end, without asking the coordinator's strand anything.
class EpochEnds final : public metrics::Sink {
 public:
  void DeclareCounter(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareGauge(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                        std::vector<metrics::Labels>) override {}
  void Add(std::string_view counter, double, const metrics::Labels&) override {
    if (counter != "epochs_total") return;
    const std::lock_guard lock(mutex_);
    ++count_;
    changed_.notify_all();
  }
  void Set(std::string_view, double, const metrics::Labels&) override {}
  void Observe(std::string_view, double, const metrics::Labels&) override {}

  /// The end of so many epochs in all.
  void Await(uint32_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t count_ = 0;
};

}  // namespace weightwire::load
