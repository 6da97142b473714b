#include "client/cli/top.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <thread>
#include <vector>

#include "client/cli/epoch_engines.h"
#include "client/cli/render.h"
#include "client/cli/table.h"
#include "server/base/clock.h"

namespace weightwire::cli {
namespace {

constexpr StatusAsk kShown = {.epochs_max = kEpochsAround, .participants = false};
constexpr size_t kPageColumns = 80;  ///< where there is no terminal to ask
constexpr const char* kBold = "\x1b[1m";
constexpr const char* kAlarm = "\x1b[1;33m";
constexpr const char* kPlain = "\x1b[0m";
constexpr const char* kHome = "\x1b[H";
constexpr const char* kClearLine = "\x1b[K";
constexpr const char* kClearBelow = "\x1b[J";
constexpr const char* kClear = "\x1b[2J";

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
              ? "nothing committed yet"
              : "version " + std::to_string(status.committed_version()) + " committed " +
                    SecondsText(std::max(0.0, now - status.committed_unix_seconds())) + " ago";
  return text + "; " + std::to_string(ready) + " of " + std::to_string(status.engines_size()) +
         " engines ready; " + CountText(static_cast<uint64_t>(ParticipantsOf(status)), "rank") +
         ", " + CountText(status.agents(), "agent");
}

TopOptions TerminalSize() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0 || size.ws_col == 0)
    return {kPageColumns, 24, false};
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
                    const TopOptions& screen) {
  constexpr size_t kWaitingLines = 3;
  const bool waits = !status.waiting_for().empty();
  const std::string head = Wrapped(HeadLine(status, now_unix_seconds), screen.columns, 2);
  const std::string waiting =
      Wrapped(WaitingText(status) + (waits ? PhaseAge(status) : ""), screen.columns, kWaitingLines);
  View engines{.wide = screen.columns == 0, .columns = screen.columns}, epochs = engines;
  if (screen.lines != 0) {
    // Of what is left, with two headings, two empty lines and the line that sums up, epochs get a
    // third.
    const auto used = static_cast<size_t>(5 + 2 + std::ranges::count(head + waiting, '\n'));
    const size_t left = screen.lines > used ? screen.lines - used : 2;
    engines.rows = std::max<size_t>(1, left - left / 3);
    engines.errors_cut = true;  // else they would take the room of what is below
    epochs.rows = std::max<size_t>(
        1, left - std::min(engines.rows, static_cast<size_t>(status.engines_size())));
  }
  std::istringstream in(EnginesText(status, engines) + "\n" + EpochsText(status, epochs));
  auto colored = [&](const char* color, const std::string& lines) {
    return screen.colors ? color + lines + kPlain : lines;
  };
  std::string out =
      colored(kBold, head) + "\n" + (waits ? colored(kAlarm, waiting) : waiting) + "\n\n";
  auto number = static_cast<size_t>(std::ranges::count(out, '\n'));
  for (std::string line; std::getline(in, line); ++number) {
    if (screen.lines != 0 && number + 1 > screen.lines) break;
    out += (screen.columns == 0 ? line : Cut(line, screen.columns)) + "\n";
  }
  return out;
}

Status RunTop(Connection connection, uint32_t interval_ms, bool once, Output output) {
  if (once || isatty(STDOUT_FILENO) == 0) {
    WW_ASSIGN_OR_STATUS(const v1::StatusResponse status, connection.GetStatus(kShown));
    const TopOptions page = {output == Output::kWide ? size_t{0} : kPageColumns, 0, false};
    std::fputs(TopText(status, SystemClock().WallSeconds(), page).c_str(), stdout);
    return OkStatus();
  }
  std::fputs(kClear, stdout);
  std::string shown;
  while (true) {
    TopOptions screen = TerminalSize();
    screen.lines -= 1;  // for a complaint above
    const auto status = connection.GetStatus(kShown);
    if (status) shown = TopText(*status, SystemClock().WallSeconds(), screen);
    const std::string text =
        status ? shown
               : Cut("NO ANSWER: " + status.error().message(), screen.columns) + "\n" + shown;
    if (!Draw(text)) return OkStatus();
    std::this_thread::sleep_for(std::chrono::milliseconds(interval_ms));
  }
}

}  // namespace weightwire::cli
