#include "server/rpc/local_processes.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <ctime>
#include <sstream>
#include <string>
#include <string_view>

#include "server/memory/region.h"
#include "server/memory/uid_refusal.h"

namespace weightwire::rpc {
namespace {

constexpr size_t kKnownMax = 1'024;
constexpr Nanos kRefusedFor = std::chrono::minutes(10);

struct ProcState {
  char state = 0;
  uint64_t began = 0;  ///< clock ticks since the boot: no two processes of one pid have the same
};

/// proc(5), /proc/PID/stat; nothing when there is no such process.
std::optional<ProcState> StateOf(int64_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const memory::UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return std::nullopt;
  std::array<char, 1'024> buffer{};
  const ssize_t got = read(fd.get(), buffer.data(), buffer.size());
  if (got <= 0) return std::nullopt;
  const std::string_view text(buffer.data(), static_cast<size_t>(got));
  const size_t name_end = text.rfind(')');  // a name may have brackets of its own
  if (name_end == std::string_view::npos) return std::nullopt;
  std::istringstream fields(std::string(text.substr(name_end + 1)));
  ProcState out;
  std::string skipped;
  fields >> out.state;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  fields >> out.began;
  if (!fields) return std::nullopt;
  return out;
}

/// "2026-11-26T01:40:12Z"
std::string WallText() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts)};
}

}  // namespace

void LocalProcesses::Connected(int socket) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.pid <= 0) return;
  const auto state = StateOf(peer.pid);
  if (!state) return;
  std::lock_guard lock(mutex_);
  known_[peer.pid] = state->began;
  if (known_.size() <= kKnownMax) return;
  std::erase_if(known_, [](const auto& entry) { return !StateOf(entry.first); });
  if (known_.size() > kKnownMax) known_.erase(known_.begin());
}

bool LocalProcesses::Refused(uint32_t uid) {
  std::lock_guard lock(mutex_);
  refused_ = Refusal{uid, clock_.Now(), WallText()};
  return uids_refused_.size() < kKnownMax && uids_refused_.insert(uid).second;
}

std::optional<uint64_t> LocalProcesses::Began(int64_t pid) const {
  std::lock_guard lock(mutex_);
  const auto known = known_.find(pid);
  return known == known_.end() ? std::nullopt : std::optional(known->second);
}

bool LocalProcesses::Stopped(int64_t pid) const {
  const auto began = Began(pid);
  if (!began) return false;
  const auto state = StateOf(pid);
  return state && state->began == *began && (state->state == 'T' || state->state == 't');
}

bool LocalProcesses::Ended(int64_t pid) const {
  const auto began = Began(pid);
  if (!began) return false;
  const auto state = StateOf(pid);
  return !state || state->began != *began || state->state == 'Z' || state->state == 'X';
}

control::Troubles LocalProcesses::Refusals() const {
  std::lock_guard lock(mutex_);
  if (!refused_ || clock_.Now() - refused_->at > kRefusedFor) return {};
  return {{{},
           "refused a process of uid " + std::to_string(refused_->uid) + " at " + refused_->wall +
               ", for its own uid is " + std::to_string(geteuid()),
           memory::UidRefusalRemedy(refused_->uid)}};
}

}  // namespace weightwire::rpc
