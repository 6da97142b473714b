#include "server/transport/tcp/tcp_transport.h"

#include <boost/asio/io_context.hpp>
#include <future>
#include <set>
#include <utility>

#include "server/transport/operation.h"
#include "server/transport/tcp/tcp_core.h"
#include "server/transport/tcp/tcp_dial.h"
#include "server/transport/tcp/tcp_listener.h"

namespace weightwire::transport {
namespace {

class TcpTransport final : public Transport {
 public:
  explicit TcpTransport(TcpOptions options)
      : core_(std::make_shared<TcpCore>(std::move(options))),
        listener_(std::make_shared<TcpListener>(core_)) {
    WW_CHECK((core_->options.integrity == Integrity::kTls) ==
             (core_->options.tls_peers != nullptr));
  }

  ~TcpTransport() override {
    std::promise<void> no_more_sessions;
    core_->loop(0).Post([this, &no_more_sessions] {
      listener_->Stop();
      stopping_ = true;
      for (const auto& dial : std::set(dials_)) dial->Fail(ClosedHere());
      no_more_sessions.set_value();
    });
    no_more_sessions.get_future().wait();
    core_->CloseAll();
    core_->WaitUntilNoneIsLeft();
    core_->StopLoops();
  }

  const std::string& name() const override { return core_->name; }
  Capabilities capabilities() const override {
    Capabilities capabilities;
    capabilities.gets_through = true;
    capabilities.tells_leaving = true;
    capabilities.chunk_bytes_max = core_->options.chunk_bytes_max;
    capabilities.gets_in_flight_max = core_->options.gets_in_flight_max;
    return capabilities;
  }
  Status Viable() const override {
    boost::system::error_code error;
    boost::asio::ip::tcp::socket probe(core_->loop(0).context());
    probe.open(boost::asio::ip::tcp::v4(), error);
    if (!error) return OkStatus();
    return Status(Code::kUnavailable, Reason::kIoError, "no TCP socket: " + error.message());
  }
  Status Start(Handler* handler, Incarnation self) override {
    WW_CHECK(handler != nullptr && core_->handler == nullptr);
    core_->handler = handler;
    core_->self = self;
    return listener_->Open();
  }
  std::string address() const override { return listener_->address(); }
  RegionKey Export(GatherList pieces) override { return core_->exports.Export(std::move(pieces)); }
  RegionKey ExportTold(GatherList pieces, Leaving leaving) override {
    return core_->exports.Export(std::move(pieces), std::move(leaving));
  }
  void Revoke(RegionKey key, std::function<void()> done) override {
    core_->exports.Revoke(key, std::move(done));
  }
  void Connect(const std::string& address, const Hello& hello, Nanos timeout,
               ConnectDone done) override {
    auto dial = std::make_shared<TcpDial>(
        core_, address, hello, std::move(done),
        [this](const std::shared_ptr<TcpDial>& ended) { dials_.erase(ended); });
    core_->loop(0).Post([this, dial, timeout] {
      dials_.insert(dial);
      if (stopping_) return dial->Fail(ClosedHere());
      dial->Start(timeout);
    });
  }

 private:
  const std::shared_ptr<TcpCore> core_;
  const std::shared_ptr<TcpListener> listener_;
  bool stopping_ = false;  ///< on loop 0, like dials_
  std::set<std::shared_ptr<TcpDial>> dials_;
};

}  // namespace

std::unique_ptr<Transport> MakeTcpTransport(TcpOptions options) {
  return std::make_unique<TcpTransport>(std::move(options));
}

}  // namespace weightwire::transport
