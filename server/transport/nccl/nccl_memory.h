#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "server/base/clock.h"
#include "server/device/bytes.h"
#include "server/device/device.h"

namespace weightwire::transport {

/// Buffers of one GPU for the rounds that run on it in one direction, so that NCCL never has a
/// tensor's memory. Taken when first needed. Thread-safe.
///
/// Sending and receiving have buffers apart: who sends waits for the peer's buffer to receive into,
/// and that one is only ever waited for by rounds that NCCL is about to end.
class NcclBuffers {
 public:
  NcclBuffers(std::shared_ptr<device::Device> device, uint64_t bytes, uint32_t count)
      : device_(std::move(device)), bytes_(bytes), left_to_make_(count) {}

  struct Lease {
    NcclBuffers* buffers = nullptr;
    std::shared_ptr<device::Allocation> memory;
    Lease(NcclBuffers& of, std::shared_ptr<device::Allocation> taken)
        : buffers(&of), memory(std::move(taken)) {}
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease();
    std::byte* at() const { return memory->at(); }
    /// NCCL may still write to it: nobody has it again, and it is never freed.
    void Abandon();
  };
  /// Waits until one is free, at most until `deadline`, or until `stop`.
  ///   kDeadlineExceeded, kCancelled; kResourceExhausted: the GPU has no room, or all are abandoned
  Result<Lease> Borrow(Nanos deadline, const std::atomic<bool>& stop);

  uint64_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<device::Device> device_;
  const uint64_t bytes_;
  std::mutex mutex_;
  std::condition_variable returned_;
  uint32_t left_to_make_;
  uint32_t lent_ = 0;
  std::vector<std::shared_ptr<device::Allocation>> free_;
};

/// Bytes that lie together on both sides.
struct NcclRun {
  device::Bytes target;
  device::ConstBytes source;
  uint64_t bytes = 0;
};
/// What stays within one GPU is enqueued together and waited for once.
Status CopyRuns(const std::vector<NcclRun>& runs);

}  // namespace weightwire::transport
