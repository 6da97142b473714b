#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/metrics/metrics.h"

namespace weightwire::agent {

/// Counts host memory that the agent makes (stages, snapshots) or maps (imported regions), admits
/// the former, and keeps the gauges `staging_bytes` and `registered_memory_bytes` true.
///
/// Belongs to the agent's strand. Shares must not outlive the sink.
class Budget : public std::enable_shared_from_this<Budget> {
 public:
  /// `staging_max` 0: half of memory::MemoryLimit().
  static std::shared_ptr<Budget> Make(uint64_t staging_max, metrics::Sink& metrics);

  /// Gives its bytes back when destroyed. Movable; empty when default-made.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept = default;
    Share& operator=(Share&& other) noexcept;
    ~Share();
    uint64_t bytes() const { return budget_ ? bytes_ : 0; }

   private:
    friend class Budget;
    Share(std::shared_ptr<Budget> budget, uint64_t bytes, bool staging)
        : budget_(std::move(budget)), bytes_(bytes), staging_(staging) {}
    std::shared_ptr<Budget> budget_;
    uint64_t bytes_ = 0;
    bool staging_ = false;
  };

  /// Admission before allocation. kResourceExhausted / kLimitExceeded names need, use and budget.
  Result<Share> AdmitStaging(const std::string& what, uint64_t bytes);
  /// The same for what others can do without: nothing is given up for it.
  Result<Share> AdmitSpare(const std::string& what, uint64_t bytes);
  /// `give_up` is called when AdmitStaging lacks memory: it gives back what AdmitSpare admitted,
  /// and says false when it need not be asked again.
  void OnShortage(std::function<bool()> give_up) { spare_.push_back(std::move(give_up)); }
  /// Memory of another process: counted, not limited (that process owns it).
  Share CountImported(uint64_t bytes);

  uint64_t staging_bytes() const { return staging_; }

 private:
  Budget(uint64_t staging_max, metrics::Sink& metrics);
  void Change(int64_t bytes, bool staging);

  const uint64_t staging_max_;
  metrics::Sink& metrics_;
  uint64_t staging_ = 0;
  uint64_t imported_ = 0;
  std::vector<std::function<bool()>> spare_;
};

}  // namespace weightwire::agent
