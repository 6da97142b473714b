#pragma once

#include <string>

#include "server/base/status.h"

namespace weightwire::store {

/// A file that belongs to one process of all hosts that share it, as long as this lives; its text
/// says which one. The kernel's lock (of the open file, so that it ends with the process) decides,
/// not the text and not that the file is there.
class FileLock {
 public:
  /// kUnavailable / kJournalFailed: another one has it (names its process and host), or the file
  /// cannot be made.
  static Result<FileLock> Take(const std::string& path);
  FileLock() = default;
  FileLock(FileLock&& other) noexcept;
  FileLock& operator=(FileLock&& other) noexcept;
  ~FileLock();

 private:
  explicit FileLock(int fd) : fd_(fd) {}
  int fd_ = -1;
};

}  // namespace weightwire::store
