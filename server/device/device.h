#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "server/base/status.h"
#include "server/device/library.h"

/// GPUs, through libweightwire_cuda.so. UNTESTED ON HARDWARE: tests run it with a library of the
/// same interface that has no GPU (tests/support/fake_cuda).
namespace weightwire::device {

class Device;

using IpcHandle = std::array<uint8_t, WW_CUDA_IPC_BYTES>;

/// Memory of a GPU: our own, freed at the end, or a mapping of another process's, unmapped then;
/// both may wait for all work of the device, so that what makes or drops one is no part of a
/// transfer. The host must not touch it.
class Allocation : public std::enable_shared_from_this<Allocation> {
 public:
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  Device& device() const { return *device_; }
  std::byte* at() const { return at_; }
  uint64_t bytes() const { return bytes_; }
  /// What names the whole allocation to other processes.
  const IpcHandle& handle() const { return handle_; }

 private:
  friend class Device;
  Allocation(std::shared_ptr<Device> device, std::byte* at, uint64_t bytes, bool opened)
      : device_(std::move(device)), at_(at), bytes_(bytes), opened_(opened) {}
  const std::shared_ptr<Device> device_;
  std::byte* const at_;
  const uint64_t bytes_;
  const bool opened_;
  IpcHandle handle_{};
};

/// What one thread needs to work with a device: a stream, and room on both sides of the bus.
class Lane {
 public:
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  std::byte* scratch() const { return scratch_; }  ///< device memory of bytes()
  std::byte* bounce() const { return bounce_; }    ///< host memory of bytes(), registered
  size_t bytes() const { return bytes_; }

  // Each enqueues behind what was enqueued before: pointers of device memory, or of `bounce`.
  Status CopyBytes(std::byte* target, const std::byte* source, size_t bytes);
  Status Copy(const ww_cuda_copy_job& job);
  Status Quantize(const ww_cuda_quantize_job& job);
  Status QuantizeFourBit(const ww_cuda_four_bit_job& job);
  /// The sum is what Wait gives.
  Status Sum(ww_cuda_sum_job job);
  /// Jobs that may run at once: none touches what another one writes.
  Status Copy(std::span<const ww_cuda_copy_job> jobs);
  /// At most kSumsMax; the sums are sums() after Wait, until the next Sum.
  Status Sum(std::span<ww_cuda_sum_job> jobs);
  /// sums() after Wait, until the next Sum or delta: bytes of gaps, changes, escapes.
  Status DeltaScan(ww_cuda_delta_scan_job job);
  /// The low half of what Wait gives: ww_cuda_delta_apply_job::applied.
  Status DeltaApply(ww_cuda_delta_apply_job job);
  /// Memory of both.
  size_t DeltaScratchBytes(int32_t order, size_t elements) const;
  /// Blocks until all of it is done. The last Sum, if there was one: of several, the first.
  Result<uint64_t> Wait();
  const uint64_t* sums() const { return reinterpret_cast<const uint64_t*>(bounce_ + bytes_); }

  static constexpr size_t kSumsMax = 512;

 private:
  friend class Device;
  Lane(Device& device, size_t bytes) : device_(device), bytes_(bytes) {}
  Status Make();

  Device& device_;
  const size_t bytes_;
  ww_cuda_stream stream_ = nullptr;
  ww_cuda_event event_ = nullptr;
  std::byte* scratch_ = nullptr;
  std::byte* bounce_ = nullptr;  ///< followed by the sums
  bool registered_ = false;
  bool busy_ = false;  ///< something was enqueued and not waited for
};

struct LaneSizes {
  uint32_t lanes = 1;
  /// Of each lane, twice: on the device and, locked, on the host. A multiple of 256.
  size_t bytes = 1 << 20;
};

/// One GPU. Thread-safe.
class Device : public std::enable_shared_from_this<Device> {
 public:
  /// Makes all lanes.
  ///   kFailedPrecondition / kIoError  not visible here
  ///   kResourceExhausted / kLimitExceeded, kInternal / kIoError  what CUDA said
  static Result<std::shared_ptr<Device>> Open(std::shared_ptr<const Library> library,
                                              const Uuid& uuid, const LaneSizes& lanes);
  ~Device();

  const Uuid& uuid() const { return uuid_; }
  /// As this process sees it.
  int32_t index() const { return index_; }
  std::string name() const { return ToString(uuid_); }

  ///   kResourceExhausted / kLimitExceeded  names the bytes and the device
  Result<std::shared_ptr<Allocation>> Allocate(uint64_t bytes);
  /// A process maps an allocation once and its own never: what is mapped already is given again,
  /// and a handle of our own gives the allocation itself. Blocks while one that was dropped is
  /// still being unmapped.
  ///   kUnavailable / kMemoryInvalid  its process is gone, or it is no memory of this device
  Result<std::shared_ptr<Allocation>> OpenIpc(const IpcHandle& handle);

  /// Makes this GPU the calling thread's current one, for libraries that go by it (NCCL).
  Status UseOnThisThread();
  /// A stream for such a library. Destroyed with the last copy; what is enqueued runs on.
  Result<std::shared_ptr<void>> MakeStream();

  /// Copies between the two go directly from now on. Not an error that stops anything: without it
  /// CUDA copies through host memory.
  Status Connect(const Device& other);
  /// What a NIC has written to this GPU's memory before the call is seen by what is enqueued here
  /// after it. May block for that; costs nothing where the GPU orders such writes by itself.
  ///   kInternal / kIoError  what CUDA said
  Status FlushWrites();

  struct Return {
    void operator()(Lane* lane) const;
  };
  using BorrowedLane = std::unique_ptr<Lane, Return>;
  /// Waits while all lanes are lent. Who borrows of several devices does so in the order of their
  /// UUIDs, so that nobody waits in a circle. A lane comes back when its work is done.
  BorrowedLane Borrow();

 private:
  friend class Allocation;
  friend class Lane;
  Device(std::shared_ptr<const Library> library, int32_t index, const Uuid& uuid)
      : library_(std::move(library)), index_(index), uuid_(uuid) {}
  const Library::Calls& calls() const { return library_->calls(); }
  /// OK, or what the call that gave `code` has left in words.
  Status Checked(int32_t code) const;
  void Release(const Allocation& allocation);

  const std::shared_ptr<const Library> library_;
  const int32_t index_;
  const Uuid uuid_;
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<Lane*> free_;
  std::mutex allocations_mutex_;
  std::condition_variable released_;
  /// By handle, until it is freed or unmapped.
  std::map<IpcHandle, std::weak_ptr<Allocation>> allocations_;
};

}  // namespace weightwire::device
