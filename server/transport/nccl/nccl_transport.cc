#include "server/transport/nccl/nccl_transport.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "server/transport/address.h"
#include "server/transport/nccl/nccl_core.h"
#include "server/transport/nccl/nccl_endpoint.h"

namespace weightwire::transport {
namespace {

/// Facts of an address: "host:port?nccl=22809&gpu=0d8f1c2e,…".
constexpr char kVersion[] = "nccl";
constexpr char kGpus[] = "gpu";

std::string VersionText(int32_t version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

/// What a session of tcp is told to carry, besides what the user sends.
TcpOptions SessionsOf(TcpOptions options) {
  options.name = "nccl";
  options.integrity = Integrity::kCrc;
  options.connections = options.near_connections = 1;
  options.io_threads = 1;
  options.notify_bytes_max = kNcclMessageBytesMax;
  static_assert(kNcclMessageBytesMax <= kTcpNotifyBytesMax);
  options.bounds = [](std::span<const std::byte> message) { return IsNotify(message); };
  return options;
}

class NcclTransport final : public Transport, public Handler {
 public:
  explicit NcclTransport(NcclOptions options)
      : inner_(MakeTcpTransport(SessionsOf(options.sessions))) {
    options.sessions.name = "nccl";
    core_ = std::make_shared<NcclCore>(std::move(options));
  }

  ~NcclTransport() override {
    inner_.reset();  // ends every session
    core_->WaitUntilNoneIsLeft();
    core_->Stop();
  }

  const std::string& name() const override { return core_->name; }
  Capabilities capabilities() const override {
    Capabilities capabilities;
    capabilities.gets_device_memory = true;
    capabilities.chunk_bytes_max = core_->options.sessions.chunk_bytes_max;
    capabilities.gets_in_flight_max = core_->options.sessions.gets_in_flight_max;
    return capabilities;
  }
  Status Viable() const override {
    if (!core_->has_gpus()) {
      const Status& none = core_->options.none;
      return Status(Code::kFailedPrecondition, Reason::kTransportFailed,
                    "no GPU memory: " + (none.ok() ? "no GPU is visible" : none.message()))
          .Remedy(none.remedy());
    }
    if (!core_->library) return core_->library.error();
    return inner_->Viable();
  }
  std::string choices() const override {
    std::string names;
    for (const auto& gpu : core_->gpus()) {
      names += (names.empty() ? "" : ", ") + gpu->device->name();
    }
    return "NCCL " + VersionText((*core_->library)->nccl_version()) +
           " between GPUs of peers and " + names + " (untested on hardware)";
  }
  Status Start(Handler* handler, Incarnation self) override {
    core_->handler = handler;
    return inner_->Start(this, self);
  }
  std::string address() const override {
    std::vector<std::string> gpus;
    for (const auto& gpu : core_->gpus()) gpus.push_back(device::ShortName(gpu->device->uuid()));
    return JoinFacts(inner_->address(), {{kVersion, Version()}, {kGpus, JoinGpus(gpus)}});
  }

  Status Reaches(const std::string& text) const override {
    WW_RETURN_IF_ERROR(core_->stuck());
    AddressFacts peer = SplitFacts(text);
    const auto refuse = [](std::string why, std::string remedy) {
      return Status(Code::kFailedPrecondition, Reason::kTransportFailed, std::move(why))
          .Remedy(std::move(remedy));
    };
    if (peer.facts[kVersion] != Version()) {
      return refuse("the peer has NCCL " + peer.facts[kVersion] + ", we have " + Version(),
                    "give all agents the same libnccl.so.2");
    }
    const char* shares = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");  // NCCL's own setting
    if (shares != nullptr && std::string_view(shares) == "1") return OkStatus();
    const std::vector<std::string> theirs = SplitGpus(peer.facts[kGpus]);
    for (const auto& gpu : core_->gpus()) {
      const std::string name = device::ShortName(gpu->device->uuid());
      if (std::ranges::find(theirs, name) == theirs.end()) continue;
      return refuse("the peer has our GPU …" + name + ", and NCCL takes a GPU once",
                    "name cuda_ipc before nccl: it is for agents of one host");
    }
    return OkStatus();
  }

  RegionKey Export(GatherList pieces) override {
    return core_->exports().Export(std::move(pieces));
  }
  void Revoke(RegionKey key, std::function<void()> done) override {
    core_->exports().Revoke(key, std::move(done));
  }

  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override {
    inner_->Connect(SplitFacts(address).address, hello, timeout,
                    [core = core_, done = std::move(done)](auto inner) mutable {
                      if (!inner) {
                        return core->Post([done = std::move(done), why = std::move(inner.error())] {
                          done(Fail(why));
                        });
                      }
                      auto endpoint = std::make_shared<NcclEndpoint>(core, *inner);
                      core->Add((*inner)->id(), endpoint);
                      endpoint->Open(std::move(done));
                    });
  }

  // Of the sessions below.
  Result<Ticket> OnHello(const CallerHello& said) override { return core_->handler->OnHello(said); }
  void OnAccepted(std::shared_ptr<Endpoint> inner) override {
    const uint64_t id = inner->id();
    core_->Add(id, std::make_shared<NcclEndpoint>(core_, std::move(inner)));
  }
  void OnNotify(const std::shared_ptr<Endpoint>& inner,
                std::span<const std::byte> message) override {
    if (const auto endpoint = core_->Find(inner->id())) endpoint->OnMessage(message);
  }
  void OnClosed(const std::shared_ptr<Endpoint>& inner, const Status& why) override {
    if (const auto endpoint = core_->Find(inner->id())) endpoint->OnInnerClosed(why);
  }

 private:
  std::string Version() const { return std::to_string((*core_->library)->nccl_version()); }

  std::unique_ptr<Transport> inner_;
  std::shared_ptr<NcclCore> core_;
};

}  // namespace

std::unique_ptr<Transport> MakeNcclTransport(NcclOptions options) {
  return std::make_unique<NcclTransport>(std::move(options));
}

}  // namespace weightwire::transport
