#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include "server/plan/segments.h"
#include "server/transfer/transfer.h"

namespace weightwire::transfer {

/// The source's sums of one slot, of host memory, each made of the source's tensors just before its
/// segment is sent, while the sender is about to read it anyhow; all that are left when somebody
/// asks for them. Two threads that need the same one both make it: it is the same.
class LeavingSums {
 public:
  /// `sums_at`: where the slot's sums belong, which are its first bytes. What is referred to must
  /// outlive it, and not change.
  LeavingSums(const plan::Stream& stream, const plan::StreamSchedule& schedule, uint32_t slot,
              const Binding& binding, std::byte* sums_at);
  /// The sum of segment `i` of the slot. Before anybody reads the slot.
  void Made(uint32_t i, uint64_t sum);
  /// See transport::Leaving. Any thread.
  void Leave(uint64_t offset, uint64_t bytes);
  /// Gives all sums, and true, once they have been asked for. Any thread.
  bool Take(std::span<uint64_t> into) const;

 private:
  struct Sum {
    std::atomic<uint64_t> value = 0;
    std::atomic<bool> made = false;
  };
  void Make(uint32_t i);
  void MakeAll();

  const plan::Stream& stream_;
  const plan::StreamSchedule& schedule_;
  const plan::SlotSpan& span_;
  const Binding& binding_;
  std::byte* const sums_at_;
  const std::unique_ptr<Sum[]> sums_;
  std::once_flag all_;
  std::atomic<bool> complete_ = false;
};

}  // namespace weightwire::transfer
