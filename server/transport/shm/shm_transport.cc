#include "server/transport/shm/shm_transport.h"

#include <unistd.h>

#include <cstring>
#include <future>
#include <utility>

#include "server/transport/operation.h"
#include "server/transport/shm/shm_core.h"
#include "server/transport/shm/shm_gate.h"

namespace weightwire::transport {
namespace {

class ShmTransport final : public Transport {
 public:
  explicit ShmTransport(ShmOptions options)
      : core_(std::make_shared<ShmCore>(std::move(options))),
        gate_(std::make_shared<ShmGate>(core_)) {}

  ~ShmTransport() override {
    std::promise<void> closing;
    core_->loop.Post([this, &closing] {
      gate_->Stop();
      core_->CloseAll();
      closing.set_value();
    });
    closing.get_future().wait();
    core_->WaitUntilNoneIsLeft();
    core_->copiers.Stop();
    core_->loop.Stop();
  }

  const std::string& name() const override { return core_->name; }
  Capabilities capabilities() const override {
    Capabilities capabilities;
    capabilities.map = true;
    capabilities.chunk_bytes_max = core_->options.chunk_bytes_max;
    capabilities.gets_in_flight_max = core_->options.gets_in_flight_max;
    return capabilities;
  }
  Status Viable() const override {
    auto probe = memory::MemoryRegion::Allocate("weightwire-probe", 1);
    if (!probe.has_value()) return probe.error();
    return OkStatus();
  }
  Status Start(Handler* handler, Incarnation self) override {
    WW_CHECK(handler != nullptr && core_->handler == nullptr);
    core_->handler = handler;
    core_->self = self;
    return gate_->Open();
  }
  std::string address() const override { return gate_->address(); }
  RegionKey Export(GatherList pieces) override {
    core_->loop.Post([core = core_] { core->ForgetDeadRegions(); });
    return core_->exports.Export(std::move(pieces));
  }
  void Revoke(RegionKey key, std::function<void()> done) override {
    core_->exports.Revoke(key, std::move(done));
    core_->loop.Post([core = core_] { core->ForgetDeadRegions(); });
  }
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override {
    core_->loop.Post([gate = gate_, address, hello, deadline = DeadlineAfter(timeout),
                      done = std::move(done)]() mutable {
      gate->Call(address, hello, deadline, std::move(done));
    });
  }

 private:
  const std::shared_ptr<ShmCore> core_;
  const std::shared_ptr<ShmGate> gate_;
};

}  // namespace

std::unique_ptr<Transport> MakeShmTransport(ShmOptions options) {
  return std::make_unique<ShmTransport>(std::move(options));
}

}  // namespace weightwire::transport
