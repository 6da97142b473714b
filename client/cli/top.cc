#include "client/cli/top.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "client/cli/render.h"
#include "client/cli/table.h"
#include "server/base/clock.h"

namespace weightwire::cli {
namespace {

constexpr const char* kBold = "\x1b[1m";
constexpr const char* kAlarm = "\x1b[1;33m";
constexpr const char* kPlain = "\x1b[0m";
constexpr const char* kHome = "\x1b[H";
constexpr const char* kClearLine = "\x1b[K";
constexpr const char* kClearBelow = "\x1b[J";
constexpr const char* kClear = "\x1b[2J";

/// The first `columns` columns of `line`; UTF-8 sequences stay whole.
std::string Cut(const std::string& line, size_t columns) {
  size_t used = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if ((static_cast<unsigned char>(line[i]) & 0xC0U) == 0x80U) continue;
    if (used++ == columns) return line.substr(0, i);
  }
  return line;
}

/// "" without an epoch in progress; else how long it has been in its phase.
std::string PhaseAge(const v1::StatusResponse& status) {
  for (const auto& epoch : status.epochs()) {
    double seconds = 0;
    switch (epoch.phase()) {
      case v1::EPOCH_PHASE_COMMITTED:
      case v1::EPOCH_PHASE_ABORTED:
        continue;
      case v1::EPOCH_PHASE_PREPARING:
        seconds = epoch.prepare_seconds();
        break;
      case v1::EPOCH_PHASE_TRANSFERRING:
        seconds = epoch.transfer_seconds();
        break;
      case v1::EPOCH_PHASE_COMMITTING:
        seconds = epoch.commit_seconds();
        break;
      default:
        seconds = epoch.total_seconds() - epoch.prepare_seconds() - epoch.transfer_seconds();
    }
    return ", for " + SecondsText(seconds);
  }
  return "";
}

std::string HeadLine(const v1::StatusResponse& status, double now) {
  int64_t ready = 0;
  for (const auto& engine : status.engines()) ready += engine.ready() ? 1 : 0;
  std::string text = "job " + status.job() + ": ";
  text += status.committed_epoch() == 0
              ? "nothing committed"
              : "version " + std::to_string(status.committed_version()) + " committed " +
                    SecondsText(std::max(0.0, now - status.committed_unix_seconds())) + " ago";
  return text + "; " + std::to_string(ready) + " of " + std::to_string(status.engines_size()) +
         " engines ready; " + std::to_string(status.participants_size()) + " ranks, " +
         std::to_string(status.agents()) + " agents";
}

Screen TerminalSize() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) return {80, 24, false};
  return {size.ws_col, size.ws_row, std::getenv("NO_COLOR") == nullptr};
}

/// Over what is there, line by line, so that nothing flickers.
bool Draw(const std::string& text) {
  std::string out = kHome;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    out.append(line).append(kClearLine).append("\r\n");
  }
  out.resize(out.size() - 2);  // a line's end in the last row would scroll
  out += kClearBelow;
  return std::fputs(out.c_str(), stdout) >= 0 && std::fflush(stdout) == 0;
}

}  // namespace

std::string TopText(const v1::StatusResponse& status, double now_unix_seconds,
                    const Screen& screen) {
  const bool waits = !status.waiting_for().empty();
  std::string text = HeadLine(status, now_unix_seconds) + "\nwaiting for: " +
                     (waits ? status.waiting_for() + PhaseAge(status) : "nothing") + "\n\n" +
                     EnginesText(status) + "\n" + EpochsText(status);
  std::istringstream in(text);
  std::string out;
  size_t number = 0;
  for (std::string line; std::getline(in, line); ++number) {
    if (screen.lines != 0 && number + 1 > screen.lines) break;
    if (screen.columns != 0) line = Cut(line, screen.columns);
    if (screen.colors && number == 0) line = kBold + line + kPlain;
    if (screen.colors && number == 1 && waits) line = kAlarm + line + kPlain;
    out += line + "\n";
  }
  return out;
}

Status RunTop(Connection connection, uint32_t interval_ms, bool once) {
  if (once || isatty(STDOUT_FILENO) == 0) {
    WW_ASSIGN_OR_STATUS(const v1::StatusResponse status, connection.GetStatus());
    std::fputs(TopText(status, SystemClock().WallSeconds(), {}).c_str(), stdout);
    return OkStatus();
  }
  std::fputs(kClear, stdout);
  std::string shown;
  while (true) {
    Screen screen = TerminalSize();
    screen.lines -= 1;  // for a complaint above
    const auto status = connection.GetStatus();
    if (status) shown = TopText(*status, SystemClock().WallSeconds(), screen);
    const std::string text =
        status ? shown
               : Cut("NO ANSWER: " + status.error().message(), screen.columns) + "\n" + shown;
    if (!Draw(text)) return OkStatus();
    std::this_thread::sleep_for(std::chrono::milliseconds(interval_ms));
  }
}

}  // namespace weightwire::cli
