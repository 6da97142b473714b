#include "server/transport/ucx/ucx_transport.h"

#include <future>
#include <utility>

#include "server/transport/ucx/ucx_core.h"
#include "server/transport/ucx/ucx_listener.h"

namespace weightwire::transport {
namespace {

class UcxTransport final : public Transport {
 public:
  explicit UcxTransport(UcxOptions options)
      : core_(std::make_shared<UcxCore>(std::move(options))),
        listener_(std::make_shared<UcxListener>(core_)) {}

  ~UcxTransport() override {
    std::promise<void> closing;
    core_->Post([this, &closing] {
      listener_->Stop();
      core_->ShutAll();
      closing.set_value();
    });
    closing.get_future().wait();
    core_->WaitUntilNoneIsLeft();
    core_->Stop();
  }

  const std::string& name() const override { return core_->name; }
  Capabilities capabilities() const override {
    Capabilities capabilities;
    capabilities.chunk_bytes_max = core_->options.chunk_bytes_max;
    capabilities.gets_in_flight_max = core_->options.gets_in_flight_max;
    capabilities.gets_device_memory = core_->gpu_direct();
    capabilities.flush_device_writes = core_->gpu_direct();
    return capabilities;
  }
  Status Viable() const override { return core_->viable(); }
  std::string choices() const override { return core_->choices(); }
  Status Start(Handler* handler, Incarnation self) override {
    WW_CHECK(handler != nullptr && core_->handler == nullptr);
    core_->handler = handler;
    core_->self = self;
    return listener_->Open();
  }
  std::string address() const override { return listener_->address(); }
  RegionKey Export(GatherList pieces) override {
    for (const memory::RegionSpan& piece : pieces) {
      WW_CHECK(core_->gpu_direct() || !piece.region->on_device());
    }
    // Registered now, so that the first reader need not wait for it. A refusal is told to readers.
    core_->Post([core = core_.get(), pieces] {
      if (!core->viable().ok()) return;
      core->ForgetDeadRegions();
      std::string ignored;
      for (const memory::RegionSpan& piece : pieces) {
        core->registry().Of(core->worker(), piece.region, ignored);
      }
    });
    return core_->exports.Export(std::move(pieces));
  }
  void Revoke(RegionKey key, std::function<void()> done) override {
    core_->exports.Revoke(key, std::move(done));
  }
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override {
    listener_->Call(address, hello, timeout, std::move(done));
  }

 private:
  const std::shared_ptr<UcxCore> core_;
  const std::shared_ptr<UcxListener> listener_;
};

}  // namespace

std::unique_ptr<Transport> MakeUcxTransport(UcxOptions options) {
  return std::make_unique<UcxTransport>(std::move(options));
}

}  // namespace weightwire::transport
