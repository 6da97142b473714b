#include "server/tls/watched_file.h"

#include <sys/stat.h>

#include <fstream>
#include <iterator>
#include <utility>

namespace weightwire::tls {

Result<std::string> WatchedFile::Read() {
  std::lock_guard lock(mutex_);
  struct stat about {};
  if (stat(path_.c_str(), &about) == 0) {
    const Stamp stamp{about.st_dev, about.st_ino, about.st_size,
                      about.st_mtim.tv_sec * 1'000'000'000 + about.st_mtim.tv_nsec};
    if (read_ && stamp == stamp_) return text_;
    std::ifstream in(path_, std::ios::binary);
    std::string text{std::istreambuf_iterator<char>(in), {}};
    if (in && !in.bad()) {
      text_ = std::move(text);
      stamp_ = stamp;
      read_ = true;
    }
  }
  if (read_) return text_;
  return Fail(Code::kInvalidArgument, Reason::kConfigInvalid, path_ + " cannot be read");
}

}  // namespace weightwire::tls
