#include "server/agent/budget.h"

#include <utility>

#include "server/memory/host_memory.h"

namespace weightwire::agent {

std::shared_ptr<Budget> Budget::Make(uint64_t staging_max, metrics::Sink& metrics) {
  return std::shared_ptr<Budget>(
      new Budget(staging_max == 0 ? memory::MemoryLimit() / 2 : staging_max, metrics));
}

Budget::Budget(uint64_t staging_max, metrics::Sink& metrics)
    : staging_max_(staging_max), metrics_(metrics) {
  Change(0, true);
}

Budget::Share& Budget::Share::operator=(Share&& other) noexcept {
  std::swap(budget_, other.budget_);
  std::swap(bytes_, other.bytes_);
  std::swap(staging_, other.staging_);
  return *this;
}

Budget::Share::~Share() {
  if (budget_) budget_->Change(-static_cast<int64_t>(bytes_), staging_);
}

Result<Budget::Share> Budget::AdmitStaging(const std::string& what, uint64_t bytes) {
  if (bytes > staging_max_ - staging_) {
    std::erase_if(spare_, [](const std::function<bool()>& give_up) { return !give_up(); });
  }
  return AdmitSpare(what, bytes);
}

Result<Budget::Share> Budget::AdmitSpare(const std::string& what, uint64_t bytes) {
  if (bytes > staging_max_ - staging_) {
    return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                       what + " needs " + std::to_string(bytes) + " bytes; " +
                           std::to_string(staging_) + " of the budget of " +
                           std::to_string(staging_max_) + " are in use")
                    .Remedy("raise the agent's stage budget or place fewer ranks on it"));
  }
  Change(static_cast<int64_t>(bytes), true);
  return Share(shared_from_this(), bytes, true);
}

Budget::Share Budget::CountImported(uint64_t bytes) {
  Change(static_cast<int64_t>(bytes), false);
  return Share(shared_from_this(), bytes, false);
}

void Budget::Change(int64_t bytes, bool staging) {
  uint64_t& counted = staging ? staging_ : imported_;
  counted += static_cast<uint64_t>(bytes);
  metrics_.Set("staging_bytes", static_cast<double>(staging_));
  metrics_.Set("registered_memory_bytes", static_cast<double>(staging_ + imported_));
}

}  // namespace weightwire::agent
