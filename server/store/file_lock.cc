#include "server/store/file_lock.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace weightwire::store {
namespace {

constexpr size_t kTextMax = 512;

std::string OwnText() {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  return "process " + std::to_string(getpid()) + " on host " + host;
}

std::string TextOf(int fd) {
  char text[kTextMax];
  const ssize_t size = pread(fd, text, sizeof(text), 0);
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : "another process";
}

}  // namespace

Result<FileLock> FileLock::Take(const std::string& path) {
  FileLock lock(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (lock.fd_ < 0) {
    return Fail(
        Status(Code::kUnavailable, Reason::kJournalFailed, path + ": " + std::strerror(errno))
            .Remedy("check that state_dir exists, is writable and has space"));
  }
  struct flock whole {};
  whole.l_type = F_WRLCK;
  whole.l_whence = SEEK_SET;
  if (fcntl(lock.fd_, F_OFD_SETLK, &whole) != 0) {
    const bool held = errno == EAGAIN || errno == EACCES;
    return Fail(Status(Code::kUnavailable, Reason::kJournalFailed,
                       path + " is locked by " + (held ? TextOf(lock.fd_) : std::strerror(errno)))
                    .Remedy("one coordinator at a time has a state_dir: end the other one, or give "
                            "this one its own; several for one job share an etcd"));
  }
  // For people: where there is no space for it, the lock holds all the same.
  const std::string text = OwnText();
  if (ftruncate(lock.fd_, 0) == 0) (void)!pwrite(lock.fd_, text.data(), text.size(), 0);
  return lock;
}

FileLock::FileLock(FileLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
FileLock& FileLock::operator=(FileLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}
FileLock::~FileLock() {
  if (fd_ >= 0) close(fd_);
}

}  // namespace weightwire::store
