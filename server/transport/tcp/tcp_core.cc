#include "server/transport/tcp/tcp_core.h"

#include <utility>

#include "server/transport/tcp/tcp_endpoint.h"

namespace weightwire::transport {

TcpCore::TcpCore(TcpOptions the_options)
    : options(std::move(the_options)),
      exports([this](Task task) { loop(0).Post(std::move(task)); }) {
  for (int i = 0; i < options.io_threads; ++i) {
    loops_.push_back(std::make_unique<IoLoop>("ww-tcp-" + std::to_string(i)));
  }
}

void TcpCore::StopLoops() {
  for (const auto& io_loop : loops_) io_loop->Stop();
}

void TcpCore::Add(std::shared_ptr<TcpEndpoint> endpoint) {
  std::lock_guard lock(mutex_);
  const uint64_t id = endpoint->id();
  endpoints_.emplace(id, std::move(endpoint));
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
}

void TcpCore::Remove(uint64_t endpoint_id) {
  std::shared_ptr<TcpEndpoint> endpoint;  // may be the last one: released after the lock
  std::lock_guard lock(mutex_);
  auto entry = endpoints_.find(endpoint_id);
  endpoint = std::move(entry->second);
  endpoints_.erase(entry);
  options.metrics->Set("connections", static_cast<double>(endpoints_.size()),
                       {{"transport", name}, {"state", "open"}});
  none_left_.notify_all();
}

size_t TcpCore::open_count() {
  std::lock_guard lock(mutex_);
  return endpoints_.size();
}

void TcpCore::CloseAll() {
  std::map<uint64_t, std::shared_ptr<TcpEndpoint>> endpoints;
  {
    std::lock_guard lock(mutex_);
    endpoints = endpoints_;
  }
  for (const auto& [id, endpoint] : endpoints) endpoint->Close();
}

void TcpCore::WaitUntilNoneIsLeft() {
  std::unique_lock lock(mutex_);
  none_left_.wait(lock, [this] { return endpoints_.empty(); });
}

void TcpCore::CountFull() {
  options.metrics->Add("accept_errors_total", 1, {{"errno", "handshakes_full"}});
}

void TcpCore::CountClose(const char* cause) {
  options.metrics->Add("transport_closes_total", 1, {{"transport", name}, {"cause", cause}});
}

}  // namespace weightwire::transport
