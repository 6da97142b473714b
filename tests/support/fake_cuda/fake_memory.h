#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

/// Internal to tests/support/fake_cuda: what the "devices" of one process hold. Callers hold one
/// lock around everything.
namespace weightwire::fake_cuda {

/// Shared memory that is mapped twice: `at` is what others see and nobody can read.
struct Allocation {
  std::byte* at = nullptr;
  std::byte* bytes = nullptr;
  size_t size = 0;
  int fd = -1;     ///< -1: memory that the library has not made
  int device = 0;  ///< the device's own number, not its index
  bool opened = false;
};

class Memory {
 public:
  /// Nulls when the host has none.
  std::byte* Allocate(int device, size_t size);
  /// False: no allocation (`opened` false) or mapping begins there.
  bool Release(void* at, bool opened);
  /// Memory of the host that stands for the device's; false: it is known already.
  bool Adopt(int device, void* at, size_t size);
  bool Forget(void* at);
  size_t registered() const { return registered_.size(); }
  /// The mapping of what another process has exported; null when that cannot be.
  std::byte* Open(int device, const uint8_t* handle);
  bool Export(int device, void* at, uint8_t* handle) const;
  uint64_t allocated(int device) const;
  /// Of the allocation or mapping that begins at `at`; 0: none does.
  size_t SizeOf(const void* at) const;
  /// Whose memory it is, if it is a device's.
  std::optional<int> DeviceOf(const void* at) const;
  uint64_t total(bool opened) const;

  bool Register(void* at, size_t size);
  bool Unregister(void* at);

  enum class Reach { kDevice, kRegistered, kAnyHost };
  /// Where the bytes really lie; null when [at, at + size) is not wholly of that kind or better.
  std::byte* Translate(const void* at, size_t size, Reach reach) const;

 private:
  std::byte* Map(int fd, size_t size, int device, bool opened);
  const Allocation* Find(const void* at) const;

  std::map<uintptr_t, Allocation> allocations_;
  std::map<uintptr_t, size_t> registered_;
};

}  // namespace weightwire::fake_cuda
