#include "server/transport/cuda_ipc/cuda_ipc_transport.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "server/transport/cuda_ipc/cuda_ipc_address.h"

namespace weightwire::transport {
namespace {

class CudaIpcTransport final : public LocalTransport {
 public:
  explicit CudaIpcTransport(CudaIpcOptions options)
      : LocalTransport("cuda_ipc", std::move(options.local),
                       std::make_unique<CudaIpcMemory>(options.devices)),
        none_(std::move(options.none)),
        pid_namespace_(PidNamespace()) {
    for (const auto& [uuid, device] : options.devices) {
      gpus_.push_back(device::ShortName(uuid));
      names_ += (names_.empty() ? "" : ", ") + ToString(uuid);
    }
  }

  Status Viable() const override {
    if (!gpus_.empty()) return LocalTransport::Viable();
    const std::string why = none_.ok() ? "no GPU is visible" : none_.message();
    return Status(Code::kFailedPrecondition, Reason::kTransportFailed, "no GPU memory: " + why)
        .Remedy(none_.remedy());
  }
  std::string choices() const override { return "maps memory of " + names_; }
  std::string address() const override {
    return FormatAddress({LocalTransport::address(), pid_namespace_, gpus_});
  }

  Status Reaches(const std::string& address) const override {
    const CudaIpcAddress peer = ParseCudaIpcAddress(address);
    const auto refuse = [](std::string why, std::string remedy) {
      return Status(Code::kFailedPrecondition, Reason::kTransportFailed, std::move(why))
          .Remedy(std::move(remedy));
    };
    if (!peer.pid_namespace.empty() && !pid_namespace_.empty() &&
        peer.pid_namespace != pid_namespace_) {
      return refuse("the peer is in another PID namespace, where CUDA shares no memory",
                    "let the containers share one (shareProcessNamespace)");
    }
    for (const std::string& gpu : peer.gpus) {
      if (std::ranges::find(gpus_, gpu) != gpus_.end()) continue;
      return refuse("the peer's GPU …" + gpu + " is not visible here; visible are " + names_,
                    "let the agents of a host see the same GPUs");
    }
    return OkStatus();
  }
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override {
    if (Status can = Reaches(address); !can.ok()) {
      return Post([can = std::move(can), done = std::move(done)] { done(Fail(can)); });
    }
    LocalTransport::Connect(ParseCudaIpcAddress(address).socket, hello, timeout, std::move(done));
  }

 private:
  const Status none_;
  const std::string pid_namespace_;
  std::vector<std::string> gpus_;
  std::string names_;
};

}  // namespace

std::unique_ptr<Transport> MakeCudaIpcTransport(CudaIpcOptions options) {
  return std::make_unique<CudaIpcTransport>(std::move(options));
}

}  // namespace weightwire::transport
