#include "server/transport/local_core.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "server/transport/local_endpoint.h"

namespace weightwire::transport {

LocalCore::LocalCore(std::string the_name, LocalOptions the_options,
                     std::unique_ptr<LocalDevices> the_devices)
    : options(std::move(the_options)),
      name(std::move(the_name)),
      devices(std::move(the_devices)),
      loop("ww-" + name),
      copiers("ww-" + name + "-copy", options.copy_threads),
      exports([this](Task task) { loop.Post(std::move(task)); }) {}

void LocalCore::CountFull() {
  options.metrics->Add("accept_errors_total", 1, {{"errno", "handshakes_full"}});
}

void LocalCore::CountClose(const char* cause) {
  options.metrics->Add("transport_closes_total", 1, {{"transport", name}, {"cause", cause}});
}

void LocalCore::Add(std::shared_ptr<LocalEndpoint> endpoint) {
  const uint64_t id = endpoint->id();
  endpoints_.emplace(id, std::move(endpoint));
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
  std::lock_guard lock(mutex_);
  count_ = endpoints_.size();
}

void LocalCore::Remove(const LocalEndpoint& endpoint) {
  const Incarnation peer = endpoint.peer();
  endpoints_.erase(endpoint.id());
  const auto of_peer = [peer](const auto& entry) { return entry.second->peer() == peer; };
  if (devices != nullptr && std::ranges::none_of(endpoints_, of_peer)) {
    copiers.Post([kept = devices->Forget(peer)]() mutable { kept.reset(); });
  }
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
  std::lock_guard lock(mutex_);
  count_ = endpoints_.size();
  none_left_.notify_all();
}

void LocalCore::CloseAll() {
  for (const auto& [id, endpoint] : std::map(endpoints_)) endpoint->Close();
}

void LocalCore::NoteSent(const std::shared_ptr<memory::MemoryRegion>& region) {
  sent_.try_emplace(region->id(), region);
}

// Ids are unique in a process and so are not told apart from those of another: the files are.
bool LocalCore::IsOurs(uint64_t id, const memory::UniqueFd& fd) const {
  const std::shared_ptr<memory::MemoryRegion> region = Ours(id);
  struct stat ours {};
  struct stat theirs {};
  return region != nullptr && fstat(region->fd(), &ours) == 0 && fstat(fd.get(), &theirs) == 0 &&
         ours.st_dev == theirs.st_dev && ours.st_ino == theirs.st_ino;
}

std::shared_ptr<memory::MemoryRegion> LocalCore::Ours(uint64_t id) const {
  const auto entry = sent_.find(id);
  return entry == sent_.end() ? nullptr : entry->second.lock();
}

void LocalCore::ForgetDeadRegions() {
  std::erase_if(sent_, [](const auto& entry) { return entry.second.expired(); });
  for (const auto& [id, endpoint] : endpoints_) endpoint->ForgetDeadRegions();
}

void LocalCore::WaitUntilNoneIsLeft() {
  std::unique_lock lock(mutex_);
  none_left_.wait(lock, [this] { return count_ == 0; });
}

}  // namespace weightwire::transport
