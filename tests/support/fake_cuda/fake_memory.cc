#include "tests/support/fake_cuda/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <iterator>
#include <string>

namespace weightwire::fake_cuda {
namespace {

constexpr uint64_t kMagic = 0x3143504955444146;
constexpr unsigned char kFresh = 0xcd;  ///< a new allocation holds no zeros that one could rely on

struct Handle {
  uint64_t magic;
  uint64_t size;
  int32_t pid;
  int32_t fd;
  int32_t device;
};

}  // namespace

std::byte* Memory::Map(int fd, size_t size, int device, bool opened) {
  void* bytes = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* at = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bytes == MAP_FAILED || at == MAP_FAILED) {
    if (bytes != MAP_FAILED) munmap(bytes, size);
    close(fd);
    return nullptr;
  }
  const Allocation made{
      static_cast<std::byte*>(at), static_cast<std::byte*>(bytes), size, fd, device, opened};
  allocations_.emplace(reinterpret_cast<uintptr_t>(at), made);
  return made.at;
}

std::byte* Memory::Allocate(int device, size_t size) {
  const int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return nullptr;
  std::byte* at = Map(fd, size, device, false);
  if (at != nullptr) std::memset(Find(at)->bytes, kFresh, size);
  return at;
}

bool Memory::Release(void* at, bool opened) {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(at));
  if (found == allocations_.end() || found->second.opened != opened || found->second.fd < 0) {
    return false;
  }
  munmap(found->second.at, found->second.size);
  munmap(found->second.bytes, found->second.size);
  close(found->second.fd);
  allocations_.erase(found);
  return true;
}

bool Memory::Adopt(int device, void* at, size_t size) {
  auto* bytes = static_cast<std::byte*>(at);
  const Allocation made{bytes, bytes, size, -1, device, false};
  return Find(at) == nullptr && allocations_.emplace(reinterpret_cast<uintptr_t>(at), made).second;
}

bool Memory::Forget(void* at) {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(at));
  if (found == allocations_.end() || found->second.fd >= 0) return false;
  allocations_.erase(found);
  return true;
}

bool Memory::Export(int device, void* at, uint8_t* handle) const {
  const auto found = allocations_.find(reinterpret_cast<uintptr_t>(at));
  if (found == allocations_.end() || found->second.opened || found->second.device != device ||
      found->second.fd < 0) {
    return false;
  }
  const Handle made{kMagic, found->second.size, getpid(), found->second.fd, device};
  std::memset(handle, 0, 64);
  std::memcpy(handle, &made, sizeof made);
  return true;
}

std::byte* Memory::Open(int device, const uint8_t* handle) {
  Handle given;
  std::memcpy(&given, handle, sizeof given);
  if (given.magic != kMagic || given.device != device || given.pid == getpid()) return nullptr;
  const std::string path = "/proc/" + std::to_string(given.pid) + "/fd/" + std::to_string(given.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  struct stat info {};
  bool fits = fstat(fd, &info) == 0 && static_cast<uint64_t>(info.st_size) == given.size;
  for (const auto& [start, known] : allocations_) {
    struct stat other {};
    fits = fits && !(fstat(known.fd, &other) == 0 && other.st_ino == info.st_ino);
  }
  if (!fits) {
    close(fd);
    return nullptr;
  }
  return Map(fd, given.size, device, true);
}

uint64_t Memory::allocated(int device) const {
  uint64_t bytes = 0;
  for (const auto& [start, one] : allocations_) {
    if (!one.opened && one.fd >= 0 && one.device == device) bytes += one.size;
  }
  return bytes;
}

size_t Memory::SizeOf(const void* at) const {
  const Allocation* found = Find(at);
  return found != nullptr && found->at == at ? found->size : 0;
}

std::optional<int> Memory::DeviceOf(const void* at) const {
  const Allocation* found = Find(at);
  return found != nullptr ? std::optional(found->device) : std::nullopt;
}

uint64_t Memory::total(bool opened) const {
  uint64_t bytes = 0;
  for (const auto& [start, one] : allocations_)
    bytes += one.fd >= 0 && one.opened == opened ? one.size : 0;
  return bytes;
}

bool Memory::Register(void* at, size_t size) {
  return Find(at) == nullptr && registered_.emplace(reinterpret_cast<uintptr_t>(at), size).second;
}

bool Memory::Unregister(void* at) { return registered_.erase(reinterpret_cast<uintptr_t>(at)) > 0; }

const Allocation* Memory::Find(const void* at) const {
  auto after = allocations_.upper_bound(reinterpret_cast<uintptr_t>(at));
  if (after == allocations_.begin()) return nullptr;
  const Allocation& found = std::prev(after)->second;
  return static_cast<const std::byte*>(at) < found.at + found.size ? &found : nullptr;
}

std::byte* Memory::Translate(const void* at, size_t size, Reach reach) const {
  if (const Allocation* found = Find(at)) {
    const auto offset = static_cast<size_t>(static_cast<const std::byte*>(at) - found->at);
    return size <= found->size - offset ? found->bytes + offset : nullptr;
  }
  auto* host = static_cast<std::byte*>(const_cast<void*>(at));
  if (reach == Reach::kAnyHost) return host;
  if (reach == Reach::kDevice) return nullptr;
  const auto address = reinterpret_cast<uintptr_t>(at);
  auto after = registered_.upper_bound(address);
  if (after == registered_.begin()) return nullptr;
  const auto& [start, length] = *std::prev(after);
  return address + size <= start + length ? host : nullptr;
}

}  // namespace weightwire::fake_cuda
