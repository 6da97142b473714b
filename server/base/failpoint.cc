#include "server/base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "server/base/status.h"

// The file is read at every crossing: it may appear at any time, and a test crosses a few thousand
// points in all.
namespace weightwire {
namespace {

struct Armed {
  std::string line;
  std::string point;
  std::string action;
  uint64_t pass = 0;
  int64_t delay_ms = 0;
};

/// Nothing: there is no file.
std::optional<Armed> Read(const char* path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  Armed armed;
  std::getline(file, armed.line);
  std::istringstream words(armed.line);
  words >> armed.point >> armed.action >> armed.pass >> armed.delay_ms;
  WW_CHECK(!words.fail());
  WW_CHECK(armed.action == "kill" || armed.action == "stop" || armed.action == "delay");
  return armed;
}

/// What the crossing has to do; nothing for all but one.
std::optional<Armed> Take(const char* path, const char* point) {
  static std::mutex mutex;
  static std::string counted;  // line whose crossings `passed` counts
  static uint64_t passed = 0;
  std::lock_guard lock(mutex);
  auto armed = Read(path);
  if (!armed || armed->point != point) return std::nullopt;
  if (std::exchange(counted, armed->line) != armed->line) passed = 0;
  if (passed++ < armed->pass) return std::nullopt;
  counted.clear();
  WW_CHECK(std::rename(path, (std::string(path) + ".crossed").c_str()) == 0);
  return armed;
}

}  // namespace

void CrossFailpoint(const char* point) {
  static const char* const path = std::getenv("WEIGHTWIRE_FAILPOINT");
  if (path == nullptr) return;
  const auto armed = Take(path, point);
  if (!armed) return;
  if (armed->action == "kill") kill(getpid(), SIGKILL);
  if (armed->action == "stop") kill(getpid(), SIGSTOP);
  if (armed->action == "delay") {
    std::this_thread::sleep_for(std::chrono::milliseconds(armed->delay_ms));
  }
}

}  // namespace weightwire
