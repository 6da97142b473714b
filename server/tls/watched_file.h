#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <tuple>

#include "server/base/status.h"

namespace weightwire::tls {

/// The text of a small file, read again whenever it has changed. Thread-safe.
class WatchedFile {
 public:
  explicit WatchedFile(std::string path) : path_(std::move(path)) {}

  /// What it holds now; while it cannot be read, what it held before.
  ///   kInvalidArgument / kConfigInvalid  it never could be read
  Result<std::string> Read();
  const std::string& path() const { return path_; }

 private:
  /// Device, inode, size, time of the last change in ns.
  using Stamp = std::tuple<uint64_t, uint64_t, int64_t, int64_t>;

  const std::string path_;
  std::mutex mutex_;
  Stamp stamp_{};
  bool read_ = false;
  std::string text_;
};

}  // namespace weightwire::tls
