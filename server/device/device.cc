#include "server/device/device.h"

#include <cstdlib>
#include <cstring>
#include <utility>

namespace weightwire::device {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kAlignment = 256;  // of ww_cuda_alloc

}  // namespace

Allocation::~Allocation() { device_->Release(*this); }

Status Device::Checked(int32_t code) const {
  if (code == WW_CUDA_OK) return OkStatus();
  const std::string what = name() + ": " + calls().error();
  if (code == WW_CUDA_NO_MEMORY) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded, what)
        .Remedy("give the agent less of this GPU (gpu_slab_bytes), or the others");
  }
  return Status(Code::kInternal, Reason::kIoError, what)
      .Remedy("restart the agent: a GPU that has failed once may stay lost to its process");
}

Result<std::shared_ptr<Device>> Device::Open(std::shared_ptr<const Library> library,
                                             const Uuid& uuid, const LaneSizes& lanes) {
  WW_CHECK(lanes.lanes > 0 && lanes.bytes > 0 && lanes.bytes % kAlignment == 0);
  WW_ASSIGN(const int32_t index, library->IndexOf(uuid));
  std::shared_ptr<Device> device(new Device(std::move(library), index, uuid));
  for (uint32_t i = 0; i < lanes.lanes; ++i) {
    std::unique_ptr<Lane> lane(new Lane(*device, lanes.bytes));
    WW_FAIL_IF_ERROR(lane->Make());
    device->free_.push_back(lane.get());
    device->lanes_.push_back(std::move(lane));
  }
  return device;
}

Device::~Device() = default;

Result<std::shared_ptr<Allocation>> Device::Allocate(uint64_t bytes) {
  void* at = nullptr;
  if (Status made = Checked(calls().alloc(index_, bytes, &at)); !made.ok()) {
    return Fail(
        Status(made.code(), made.reason(), std::to_string(bytes) + " bytes on " + made.message())
            .Remedy(made.remedy()));
  }
  std::shared_ptr<Allocation> allocation(
      new Allocation(shared_from_this(), static_cast<std::byte*>(at), bytes, false));
  WW_FAIL_IF_ERROR(Checked(calls().ipc_export(index_, at, allocation->handle_.data())));
  const std::lock_guard lock(allocations_mutex_);
  allocations_[allocation->handle_] = allocation;
  return allocation;
}

Result<std::shared_ptr<Allocation>> Device::OpenIpc(const IpcHandle& handle) {
  std::unique_lock lock(allocations_mutex_);
  for (auto known = allocations_.find(handle); known != allocations_.end();
       known = allocations_.find(handle)) {
    if (auto allocation = known->second.lock()) return allocation;
    released_.wait(lock);  // its last user is letting it go
  }
  void* at = nullptr;
  if (Status made = Checked(calls().ipc_open(index_, handle.data(), &at)); !made.ok()) {
    return Fail(Code::kUnavailable, Reason::kMemoryInvalid, made.message());
  }
  size_t bytes = 0;
  if (Status sized = Checked(calls().ipc_bytes(index_, at, &bytes)); !sized.ok()) {
    calls().ipc_close(index_, at);
    return Fail(Code::kUnavailable, Reason::kMemoryInvalid, sized.message());
  }
  std::shared_ptr<Allocation> allocation(
      new Allocation(shared_from_this(), static_cast<std::byte*>(at), bytes, true));
  allocation->handle_ = handle;
  allocations_[handle] = allocation;
  return allocation;
}

// What fails here is of a device whose context is lost, which frees by itself.
void Device::Release(const Allocation& allocation) {
  {
    const std::lock_guard lock(allocations_mutex_);
    if (allocation.opened_) {
      calls().ipc_close(index_, allocation.at_);
    } else {
      calls().free(index_, allocation.at_);
    }
    const auto known = allocations_.find(allocation.handle_);
    // One that could not be exported is not there.
    if (known != allocations_.end() && known->second.expired()) allocations_.erase(known);
  }
  released_.notify_all();
}

Status Device::UseOnThisThread() { return Checked(calls().device_use(index_)); }

Result<std::shared_ptr<void>> Device::MakeStream() {
  ww_cuda_stream stream = nullptr;
  WW_FAIL_IF_ERROR(Checked(calls().stream_create(index_, &stream)));
  return std::shared_ptr<void>(stream, [self = shared_from_this()](void* made) {
    self->calls().stream_destroy(self->index_, made);
  });
}

Status Device::Connect(const Device& other) {
  return Checked(calls().peer_enable(index_, other.index_));
}

Status Device::FlushWrites() { return Checked(calls().flush_writes(index_)); }

Device::BorrowedLane Device::Borrow() {
  std::unique_lock lock(mutex_);
  returned_.wait(lock, [this] { return !free_.empty(); });
  Lane* lane = free_.back();
  free_.pop_back();
  return BorrowedLane(lane);
}

void Device::Return::operator()(Lane* lane) const {
  Device& device = lane->device_;
  if (lane->busy_) static_cast<void>(lane->Wait());  // its user has failed and told
  std::lock_guard lock(device.mutex_);
  device.free_.push_back(lane);
  device.returned_.notify_one();
}

Status Lane::Make() {
  const Library::Calls& calls = device_.calls();
  const int32_t index = device_.index_;
  WW_RETURN_IF_ERROR(device_.Checked(calls.stream_create(index, &stream_)));
  WW_RETURN_IF_ERROR(device_.Checked(calls.event_create(index, &event_)));
  void* scratch = nullptr;
  WW_RETURN_IF_ERROR(device_.Checked(calls.alloc(index, bytes_, &scratch)));
  scratch_ = static_cast<std::byte*>(scratch);
  const size_t host_bytes =
      (bytes_ + kSumsMax * sizeof(uint64_t) + kPageBytes - 1) / kPageBytes * kPageBytes;
  bounce_ = static_cast<std::byte*>(std::aligned_alloc(kPageBytes, host_bytes));
  WW_CHECK(bounce_ != nullptr);
  WW_RETURN_IF_ERROR(device_.Checked(calls.host_register(bounce_, host_bytes)));
  registered_ = true;
  return OkStatus();
}

Lane::~Lane() {
  const Library::Calls& calls = device_.calls();
  if (registered_) calls.host_unregister(bounce_);
  std::free(bounce_);
  if (scratch_ != nullptr) calls.free(device_.index_, scratch_);
  if (event_ != nullptr) calls.event_destroy(device_.index_, event_);
  if (stream_ != nullptr) calls.stream_destroy(device_.index_, stream_);
}

Status Lane::CopyBytes(std::byte* target, const std::byte* source, size_t bytes) {
  busy_ = true;
  return device_.Checked(
      device_.calls().copy_bytes(device_.index_, stream_, target, source, bytes));
}

Status Lane::Copy(const ww_cuda_copy_job& job) { return Copy(std::span(&job, 1)); }

Status Lane::Copy(std::span<const ww_cuda_copy_job> jobs) {
  busy_ = true;
  return device_.Checked(device_.calls().copy(device_.index_, stream_, jobs.data(), jobs.size()));
}

Status Lane::Quantize(const ww_cuda_quantize_job& job) {
  busy_ = true;
  return device_.Checked(device_.calls().quantize(device_.index_, stream_, &job, 1));
}

Status Lane::QuantizeFourBit(const ww_cuda_four_bit_job& job) {
  busy_ = true;
  return device_.Checked(device_.calls().quantize_four_bit(device_.index_, stream_, &job, 1));
}

Status Lane::Sum(ww_cuda_sum_job job) { return Sum(std::span(&job, 1)); }

Status Lane::Sum(std::span<ww_cuda_sum_job> jobs) {
  WW_CHECK(jobs.size() <= kSumsMax);
  busy_ = true;
  uint64_t* sum = reinterpret_cast<uint64_t*>(bounce_ + bytes_);
  for (ww_cuda_sum_job& job : jobs) job.sum = sum++;
  return device_.Checked(device_.calls().sum(device_.index_, stream_, jobs.data(), jobs.size()));
}

Status Lane::DeltaScan(ww_cuda_delta_scan_job job) {
  busy_ = true;
  job.counts = reinterpret_cast<ww_cuda_delta_counts*>(bounce_ + bytes_);
  return device_.Checked(device_.calls().delta_scan(device_.index_, stream_, &job, 1));
}

Status Lane::DeltaApply(ww_cuda_delta_apply_job job) {
  busy_ = true;
  job.applied = reinterpret_cast<uint32_t*>(bounce_ + bytes_);
  return device_.Checked(device_.calls().delta_apply(device_.index_, stream_, &job, 1));
}

size_t Lane::DeltaScratchBytes(int32_t order, size_t elements) const {
  return static_cast<size_t>(
      device_.calls().delta_scratch_bytes(order, static_cast<int64_t>(elements)));
}

Result<uint64_t> Lane::Wait() {
  const Library::Calls& calls = device_.calls();
  busy_ = false;
  WW_FAIL_IF_ERROR(device_.Checked(calls.event_record(device_.index_, event_, stream_)));
  WW_FAIL_IF_ERROR(device_.Checked(calls.event_wait(device_.index_, event_)));
  uint64_t sum = 0;
  std::memcpy(&sum, bounce_ + bytes_, sizeof(sum));
  return sum;
}

}  // namespace weightwire::device
