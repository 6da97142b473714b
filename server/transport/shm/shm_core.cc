#include "server/transport/shm/shm_core.h"

#include <utility>

#include "server/transport/shm/shm_endpoint.h"

namespace weightwire::transport {

ShmCore::ShmCore(ShmOptions the_options)
    : options(std::move(the_options)),
      loop("ww-shm"),
      copiers("ww-shm-copy", options.copy_threads),
      exports([this](Task task) { loop.Post(std::move(task)); }) {}

void ShmCore::CountFull() {
  options.metrics->Add("accept_errors_total", 1, {{"errno", "handshakes_full"}});
}

void ShmCore::CountClose(const char* cause) {
  options.metrics->Add("transport_closes_total", 1, {{"transport", name}, {"cause", cause}});
}

void ShmCore::Add(std::shared_ptr<ShmEndpoint> endpoint) {
  const uint64_t id = endpoint->id();
  endpoints_.emplace(id, std::move(endpoint));
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
  std::lock_guard lock(mutex_);
  count_ = endpoints_.size();
}

void ShmCore::Remove(uint64_t endpoint_id) {
  endpoints_.erase(endpoint_id);
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
  std::lock_guard lock(mutex_);
  count_ = endpoints_.size();
  none_left_.notify_all();
}

void ShmCore::CloseAll() {
  for (const auto& [id, endpoint] : std::map(endpoints_)) endpoint->Close();
}

void ShmCore::ForgetDeadRegions() {
  for (const auto& [id, endpoint] : endpoints_) endpoint->ForgetDeadRegions();
}

void ShmCore::WaitUntilNoneIsLeft() {
  std::unique_lock lock(mutex_);
  none_left_.wait(lock, [this] { return count_ == 0; });
}

}  // namespace weightwire::transport
