#include "server/transport/nccl/nccl_memory.h"

#include <utility>

namespace weightwire::transport {
namespace {

constexpr std::chrono::milliseconds kLookAtStop(20);

}  // namespace

NcclBuffers::Lease::~Lease() {
  if (memory == nullptr) return;
  std::lock_guard lock(buffers->mutex_);
  --buffers->lent_;
  buffers->free_.push_back(std::move(memory));
  buffers->returned_.notify_one();
}

void NcclBuffers::Lease::Abandon() {
  static auto* kept = new std::vector<std::shared_ptr<device::Allocation>>();  // to the very end
  static std::mutex kept_mutex;
  {
    std::lock_guard lock(kept_mutex);
    kept->push_back(std::move(memory));
  }
  std::lock_guard lock(buffers->mutex_);
  --buffers->lent_;
}

Result<NcclBuffers::Lease> NcclBuffers::Borrow(Nanos deadline, const std::atomic<bool>& stop) {
  std::unique_lock lock(mutex_);
  while (free_.empty() && left_to_make_ == 0) {
    if (lent_ == 0) {
      return Fail(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "NCCL has kept every buffer of " + device_->name());
    }
    if (stop) return Fail(Code::kCancelled, Reason::kNone, "the session has ended");
    if (SystemClock().Now() >= deadline) {
      return Fail(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                  "no buffer of " + device_->name() + " became free");
    }
    returned_.wait_for(lock, kLookAtStop);
  }
  ++lent_;
  if (!free_.empty()) {
    Lease lease(*this, std::move(free_.back()));
    free_.pop_back();
    return lease;
  }
  --left_to_make_;
  lock.unlock();
  auto made = device_->Allocate(bytes_);  // may wait for the GPU
  if (made) return Lease(*this, std::move(*made));
  lock.lock();
  ++left_to_make_;
  --lent_;
  return Fail(std::move(made.error()));
}

Status CopyRuns(const std::vector<NcclRun>& runs) {
  device::Device* within = nullptr;
  for (const NcclRun& run : runs) {
    if (run.target.device != nullptr && run.target.device == run.source.device) {
      within = run.target.device;
    }
  }
  if (within != nullptr) {
    const auto lane = within->Borrow();
    for (const NcclRun& run : runs) {
      if (run.target.device != within || run.source.device != within) continue;
      WW_RETURN_IF_ERROR(lane->CopyBytes(run.target.at, run.source.at, run.bytes));
    }
    WW_ASSIGN_OR_STATUS(const uint64_t ignored, lane->Wait());
    static_cast<void>(ignored);
  }
  for (const NcclRun& run : runs) {
    if (within != nullptr && run.target.device == within && run.source.device == within) continue;
    WW_RETURN_IF_ERROR(device::CopyRun(run.target, run.source, run.bytes));
  }
  return OkStatus();
}

}  // namespace weightwire::transport
