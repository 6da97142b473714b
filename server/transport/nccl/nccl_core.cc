#include "server/transport/nccl/nccl_core.h"

#include <algorithm>
#include <future>
#include <utility>

#include "server/transport/nccl/nccl_endpoint.h"

namespace weightwire::transport {

NcclCore::NcclCore(NcclOptions the_options)
    : options(std::move(the_options)),
      library(options.devices.empty() ? Fail(options.none) : NcclLibrary::Load(options)),
      home_("ww-nccl", 1),
      slow_("ww-nccl-slow", 2),
      exports_([this](Task task) { Post(std::move(task)); }) {
  for (const auto& [uuid, device] : options.devices) {
    if (gpus_.size() == kNcclLanesMax) break;
    const auto buffers = [&] {
      return NcclBuffers(device, options.buffer_bytes, options.rounds_max);
    };
    gpus_.push_back(std::unique_ptr<Gpu>(new Gpu{device, buffers(), buffers()}));
  }
}

uint32_t NcclCore::LaneOf(const device::Device* device) const {
  const auto found = std::ranges::find_if(
      gpus_, [device](const auto& gpu) { return gpu->device.get() == device; });
  return found == gpus_.end() ? 0 : static_cast<uint32_t>(found - gpus_.begin());
}

void NcclCore::Post(Task task) {
  {
    std::lock_guard lock(mutex_);
    if (!stopped_) return home_.Post(std::move(task));
  }
  task();
}

void NcclCore::Add(uint64_t inner, std::shared_ptr<NcclEndpoint> endpoint) {
  std::lock_guard lock(mutex_);
  endpoints_.emplace(inner, std::move(endpoint));
}

std::shared_ptr<NcclEndpoint> NcclCore::Find(uint64_t inner) {
  std::lock_guard lock(mutex_);
  const auto found = endpoints_.find(inner);
  return found == endpoints_.end() ? nullptr : found->second;
}

void NcclCore::Remove(uint64_t inner) {
  std::shared_ptr<NcclEndpoint> last;  // released after the lock
  std::lock_guard lock(mutex_);
  if (auto entry = endpoints_.find(inner); entry != endpoints_.end()) {
    last = std::move(entry->second);
    endpoints_.erase(entry);
  }
  none_left_.notify_all();
}

void NcclCore::WaitUntilNoneIsLeft() {
  std::unique_lock lock(mutex_);
  none_left_.wait(lock, [this] { return endpoints_.empty(); });
}

void NcclCore::Stop() {
  std::promise<void> drained;
  {
    std::lock_guard lock(mutex_);
    home_.Post([&drained] { drained.set_value(); });
    stopped_ = true;
  }
  drained.get_future().wait();
  home_.Stop();
  slow_.Stop();
}

void NcclCore::SetStuck(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (!stuck_.ok()) return;
  stuck_ = Status(Code::kUnavailable, Reason::kTransportFailed,
                  "NCCL has not given a communicator back: " + why)
               .Remedy(
                   "restart this agent when it suits; until then its peers are read over the "
                   "next of transports");
}

Status NcclCore::stuck() {
  std::lock_guard lock(mutex_);
  return stuck_;
}

}  // namespace weightwire::transport
