#include "server/rpc/fd_table.h"

#include <string>
#include <utility>

#include "server/rpc/random.h"

namespace weightwire::rpc {

FdTable::FdTable(Clock& clock, Limits limits) : clock_(clock), limits_(limits) {}

Result<uint64_t> FdTable::Put(memory::UniqueFd fd) {
  std::lock_guard lock(mutex_);
  DropExpired();
  if (entries_.size() >= limits_.entries_max) {
    return Fail(Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                       std::to_string(entries_.size()) + " fd tokens wait to be redeemed")
                    .Remedy("redeem tokens, or wait until they expire after 30 s"));
  }
  uint64_t token = RandomNonZero();
  while (entries_.contains(token)) token = RandomNonZero();
  entries_.emplace(token, Entry{std::move(fd), clock_.Now() + limits_.lifetime});
  return token;
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
  entries_.erase(entry);
  return fd;
}

size_t FdTable::size() {
  std::lock_guard lock(mutex_);
  DropExpired();
  return entries_.size();
}

void FdTable::DropExpired() {
  const Nanos now = clock_.Now();
  std::erase_if(entries_, [now](const auto& entry) { return entry.second.expires <= now; });
}

}  // namespace weightwire::rpc
