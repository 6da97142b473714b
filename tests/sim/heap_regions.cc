// Memory of the simulated hosts: this file stands in for server/memory/region.cc, whose tests are
// tests/unit/memory. A fleet makes and drops eighty regions in 5 ms; on the heap they cost no
// system call, and AddressSanitizer sees who leaves one. A file descriptor is a number of ours.
#include "tests/sim/heap_regions.h"

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "server/base/checked.h"

namespace weightwire::memory {
namespace {

constexpr size_t kAlignment = 64;  // what kernels and arenas count on
constexpr int kGone = 0xdd;

/// Bytes that several descriptors may name, here or in "another process".
struct File {
  explicit File(size_t bytes) : size(bytes) {
    void* memory = nullptr;
    WW_CHECK(posix_memalign(&memory, kAlignment, bytes) == 0);
    data = static_cast<std::byte*>(std::memset(memory, 0, bytes));
  }
  ~File() {
    std::memset(data, kGone, size);  // who still reads or serves it has wrong bytes
    std::free(data);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  const size_t size;
  std::byte* data;
};

struct Descriptors {
  std::vector<std::shared_ptr<File>> open;
  std::vector<int> free;
};

Descriptors& All() {
  static Descriptors descriptors;
  return descriptors;
}

UniqueFd Open(std::shared_ptr<File> file) {
  Descriptors& all = All();
  if (all.free.empty()) {
    all.open.push_back(std::move(file));
    return UniqueFd(static_cast<int>(all.open.size() - 1));
  }
  const int fd = all.free.back();
  all.free.pop_back();
  all.open[static_cast<size_t>(fd)] = std::move(file);
  return UniqueFd(fd);
}

const std::shared_ptr<File>& FileOf(int fd) { return All().open[static_cast<size_t>(fd)]; }

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    const UniqueFd before(Release());
    fd_ = other.Release();
  }
  return *this;
}

UniqueFd::~UniqueFd() {
  if (!valid()) return;
  All().open[static_cast<size_t>(fd_)].reset();
  All().free.push_back(fd_);
}

int UniqueFd::Release() { return std::exchange(fd_, -1); }

Result<UniqueFd> UniqueFd::Duplicate() const { return Open(FileOf(fd_)); }

MemoryRegion::MemoryRegion(UniqueFd fd, std::byte* data, uint64_t size)
    : fd_(std::move(fd)), data_(data), size_(size) {
  static uint64_t last_id = 0;
  id_ = ++last_id;
}

MemoryRegion::~MemoryRegion() = default;

Result<std::shared_ptr<MemoryRegion>> MemoryRegion::Allocate(const std::string&, uint64_t bytes) {
  WW_CHECK(bytes > 0);
  auto file = std::make_shared<File>(bytes);
  std::byte* const data = file->data;
  return std::shared_ptr<MemoryRegion>(new MemoryRegion(Open(std::move(file)), data, bytes));
}

Result<std::shared_ptr<MemoryRegion>> MemoryRegion::Import(UniqueFd fd, uint64_t bytes, Access) {
  WW_CHECK(fd.valid() && bytes > 0 && bytes <= FileOf(fd.get())->size);
  std::byte* const data = FileOf(fd.get())->data;
  return std::shared_ptr<MemoryRegion>(new MemoryRegion(std::move(fd), data, bytes));
}

// A simulated host has no GPU.
std::shared_ptr<MemoryRegion> MemoryRegion::OnDevice(std::shared_ptr<device::Allocation>, uint64_t,
                                                     uint64_t, UniqueFd, std::function<void()>) {
  CheckFailed(__FILE__, __LINE__, "no GPU");
}

Result<RegionSpan> SpanOf(std::shared_ptr<MemoryRegion> region, uint64_t offset, uint64_t bytes) {
  const auto end = CheckedAdd(offset, bytes);
  if (!end.has_value() || *end > region->size()) {
    return Fail(Code::kInvalidArgument, Reason::kMemoryInvalid, "a range that leaves its region");
  }
  return RegionSpan{std::move(region), offset, bytes};
}

}  // namespace weightwire::memory

namespace weightwire::sim {

memory::UniqueFd AnotherFd(const memory::MemoryRegion& region) {
  return memory::Open(memory::FileOf(region.fd()));
}

}  // namespace weightwire::sim
