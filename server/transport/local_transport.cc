#include "server/transport/local_transport.h"

#include <future>
#include <utility>

#include "server/transport/local_core.h"
#include "server/transport/local_listener.h"
#include "server/transport/operation.h"

namespace weightwire::transport {

LocalTransport::LocalTransport(std::string name, LocalOptions options,
                               std::unique_ptr<LocalDevices> devices)
    : core_(std::make_shared<LocalCore>(std::move(name), std::move(options), std::move(devices))),
      listener_(std::make_shared<LocalListener>(core_)) {}

LocalTransport::~LocalTransport() {
  std::promise<void> closing;
  core_->loop.Post([this, &closing] {
    listener_->Stop();
    core_->CloseAll();
    closing.set_value();
  });
  closing.get_future().wait();
  core_->WaitUntilNoneIsLeft();
  core_->copiers.Stop();
  core_->loop.Stop();
}

const std::string& LocalTransport::name() const { return core_->name; }

Capabilities LocalTransport::capabilities() const {
  Capabilities capabilities;
  capabilities.map = true;
  capabilities.maps_device_memory = core_->devices != nullptr;
  capabilities.chunk_bytes_max = core_->options.chunk_bytes_max;
  capabilities.gets_in_flight_max = core_->options.gets_in_flight_max;
  return capabilities;
}

Status LocalTransport::Viable() const {
  auto probe = memory::MemoryRegion::Allocate("weightwire-probe", 1);
  if (!probe.has_value()) return probe.error();
  return OkStatus();
}

Status LocalTransport::Start(Handler* handler, Incarnation self) {
  WW_CHECK(handler != nullptr && core_->handler == nullptr);
  core_->handler = handler;
  core_->self = self;
  return listener_->Open();
}

std::string LocalTransport::address() const { return listener_->address(); }

RegionKey LocalTransport::Export(GatherList pieces) {
  core_->loop.Post([core = core_] { core->ForgetDeadRegions(); });
  return core_->exports.Export(std::move(pieces));
}

void LocalTransport::Revoke(RegionKey key, std::function<void()> done) {
  core_->exports.Revoke(key, std::move(done));
  core_->loop.Post([core = core_] { core->ForgetDeadRegions(); });
}

void LocalTransport::Post(Task task) { core_->loop.Post(std::move(task)); }

void LocalTransport::Connect(const std::string& address, const Hello& hello, Nanos timeout,
                             ConnectDone done) {
  core_->loop.Post([listener = listener_, address, hello, deadline = DeadlineAfter(timeout),
                    done = std::move(done)]() mutable {
    listener->Call(address, hello, deadline, std::move(done));
  });
}

}  // namespace weightwire::transport
