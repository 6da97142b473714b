#include "server/rpc/fd_table.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "server/rpc/random.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace weightwire::rpc {
namespace {

constexpr uint64_t kNoPid = uint64_t{1} << 32;  // pids are below

Status TooMany(size_t count, const std::string& whose) {
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                std::to_string(count) + " fd tokens" + whose + " wait to be redeemed")
      .Remedy("redeem tokens, or wait until they expire after 30 s");
}

}  // namespace

PeerProcess::PeerProcess(int socket, uint64_t nth) : key_(kNoPid + nth) {
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0) {
    key_ = static_cast<uint64_t>(peer.pid);
  }
  int pidfd = -1;
  size = sizeof(pidfd);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) != 0 && key_ < kNoPid) {
    pidfd = static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0));
    ended_ = pidfd < 0 && errno == ESRCH;
  }
  pidfd_ = memory::UniqueFd(pidfd);
}

bool PeerProcess::Ended() const {
  pollfd ended{pidfd_.get(), POLLIN, 0};
  return ended_ || (pidfd_.valid() && poll(&ended, 1, 0) == 1);
}

FdTable::FdTable(Clock& clock, Limits limits) : clock_(clock), limits_(limits) {}

Result<uint64_t> FdTable::Put(memory::UniqueFd fd, std::shared_ptr<const PeerProcess> from) {
  const uint64_t owner = from == nullptr ? 0 : from->key();
  std::lock_guard lock(mutex_);
  DropExpired();
  WW_FAIL_IF_ERROR(CheckRoom(owner));
  uint64_t token = RandomNonZero();
  while (entries_.contains(token)) token = RandomNonZero();
  entries_.emplace(token, Entry{std::move(fd), clock_.Now() + limits_.lifetime, owner});
  Owner& known = owners_[owner];
  if (known.count++ == 0) known.process = std::move(from);
  return token;
}

Status FdTable::CheckRoom(uint64_t owner) const {
  const auto known = owners_.find(owner);
  const size_t count = known == owners_.end() ? 0 : known->second.count;
  if (owner == 0)
    return count < limits_.entries_max ? OkStatus() : TooMany(count, " of this agent");
  if (count >= limits_.per_process_max) return TooMany(count, " of this process");
  const auto own = owners_.find(0);
  const size_t others = entries_.size() - (own == owners_.end() ? 0 : own->second.count);
  return others < limits_.entries_max ? OkStatus() : TooMany(others, "");
}

Result<memory::UniqueFd> FdTable::Redeem(uint64_t token) {
  std::lock_guard lock(mutex_);
  DropExpired();
  auto entry = entries_.find(token);
  if (entry == entries_.end()) {
    return Fail(Status(Code::kNotFound, Reason::kNotRegistered,
                       "the fd token is unknown, was used, or has expired")
                    .Remedy("put the fd again and use the new token once, within 30 s"));
  }
  memory::UniqueFd fd = std::move(entry->second.fd);
  Forget(entry->second.owner);
  entries_.erase(entry);
  return fd;
}

size_t FdTable::size() {
  std::lock_guard lock(mutex_);
  DropExpired();
  return entries_.size();
}

void FdTable::Forget(uint64_t owner) {
  const auto known = owners_.find(owner);
  if (--known->second.count == 0) owners_.erase(known);
}

/// And those whose process has ended, before its pid can be another one's.
void FdTable::DropExpired() {
  const Nanos now = clock_.Now();
  std::map<uint64_t, bool> ended;
  for (const auto& [key, owner] : owners_) ended[key] = owner.process && owner.process->Ended();
  std::erase_if(entries_, [&](const auto& entry) {
    const bool over = entry.second.expires <= now || ended[entry.second.owner];
    if (over) Forget(entry.second.owner);
    return over;
  });
}

}  // namespace weightwire::rpc
