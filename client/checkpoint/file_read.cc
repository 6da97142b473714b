#include "client/checkpoint/file_read.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

namespace weightwire::checkpoint {
namespace {

// What is read in one call and then spread, so that it is still in the core's second cache.
constexpr int64_t kPieceBytes = 256 << 10;
// Up to here, reading what lies between two runs costs less than a call for each run.
constexpr int64_t kGapBytes = 4 << 10;

class Reader {
 public:
  Reader(int fd, const std::string& name, int64_t element_bytes)
      : fd_(fd), name_(name), item_(element_bytes) {}

  /// `offset` and `target` are those of the box's first element.
  Status Block(int64_t offset, unsigned char* target, const kernels::StridedBox& box) {
    int64_t span = 1;
    int64_t count = 1;
    for (int d = 0; d < box.ndim; ++d) {
      span += (box.extent[d] - 1) * box.source_stride[d];
      count *= box.extent[d];
    }
    if (span == count && IsRowMajor(box)) return Exactly(offset, target, count * item_);
    if (span * item_ <= kPieceBytes && (span - count) * item_ <= kGapBytes * Runs(box, count)) {
      WW_RETURN_IF_ERROR(Exactly(offset, piece_.data(), span * item_));
      kernels::CopyPastCaches(target, piece_.data(), box, item_);
      return OkStatus();
    }
    return Halves(offset, target, box);
  }

 private:
  Status Halves(int64_t offset, unsigned char* target, const kernels::StridedBox& box) {
    int widest = 0;
    const auto width = [&](int d) { return (box.extent[d] - 1) * box.source_stride[d]; };
    for (int d = 1; d < box.ndim; ++d) {
      if (width(d) > width(widest)) widest = d;
    }
    kernels::StridedBox half = box;
    half.extent[widest] = box.extent[widest] / 2;
    WW_RETURN_IF_ERROR(Block(offset, target, half));
    offset += half.extent[widest] * box.source_stride[widest] * item_;
    target += half.extent[widest] * box.target_stride[widest] * item_;
    half.extent[widest] = box.extent[widest] - half.extent[widest];
    return Block(offset, target, half);
  }

  /// One run of bytes on both sides, in the same order.
  static bool IsRowMajor(const kernels::StridedBox& box) {
    int64_t run = 1;
    for (int d = box.ndim - 1; d >= 0; --d) {
      if (box.extent[d] == 1) continue;
      if (box.source_stride[d] != run || box.target_stride[d] != run) return false;
      run *= box.extent[d];
    }
    return true;
  }

  /// Into how many runs of bytes the block falls on the file's side.
  static int64_t Runs(const kernels::StridedBox& box, int64_t count) {
    int64_t run = 1;
    for (bool longer = true; longer;) {
      longer = false;
      for (int d = 0; d < box.ndim; ++d) {
        if (box.extent[d] == 1 || box.source_stride[d] != run) continue;
        run *= box.extent[d];
        longer = true;
      }
    }
    return count / run;
  }

  Status Exactly(int64_t offset, unsigned char* into, int64_t bytes) {
    while (bytes > 0) {
      const ssize_t got = pread(fd_, into, static_cast<size_t>(bytes), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) {
        return Status(Code::kUnavailable, Reason::kIoError, name_ + ": " + std::strerror(errno));
      }
      if (got == 0) return Short(offset + bytes);
      into += got;
      offset += got;
      bytes -= got;
    }
    return OkStatus();
  }

  Status Short(int64_t wanted) const {
    struct stat now = {};
    const int64_t size = fstat(fd_, &now) == 0 ? now.st_size : -1;
    return Status(Code::kDataLoss, Reason::kIoError,
                  name_ + ": cut short while it was read: expected at least " +
                      std::to_string(wanted) + " bytes, found " + std::to_string(size))
        .Remedy("the file must not change while it is read: fetch it again");
  }

  const int fd_;
  const std::string& name_;
  const int64_t item_;
  static thread_local std::vector<unsigned char> piece_;
};

thread_local std::vector<unsigned char> Reader::piece_(kPieceBytes);

}  // namespace

Status ReadBlock(int fd, const std::string& name, int64_t offset, void* target,
                 const kernels::StridedBox& box, int64_t element_bytes) {
  return Reader(fd, name, element_bytes).Block(offset, static_cast<unsigned char*>(target), box);
}

}  // namespace weightwire::checkpoint
