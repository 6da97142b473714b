#include "server/daemon/daemon.h"

#include <spdlog/spdlog.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <csignal>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/base/failpoint.h"
#include "server/daemon/agent_role.h"
#include "server/daemon/coordinator_role.h"
#include "server/daemon/http_pages.h"
#include "server/daemon/http_server.h"
#include "server/daemon/http_tls.h"
#include "server/daemon/leadership.h"
#include "server/daemon/tls_setup.h"
#include "server/metrics/prometheus_sink.h"
#include "server/rpc/grpc_log.h"

namespace weightwire::daemon {
namespace {

constexpr std::chrono::seconds kSessionWait(5);

class DaemonImpl final : public Daemon {
 public:
  DaemonImpl(const Config& config, Build build)
      : config_(config),
        build_(std::move(build)),
        workers_("worker", static_cast<int>(config.worker_threads)) {}
  ~DaemonImpl() override { Stop(); }

  /// False: a signal came while this one stood by.
  Result<bool> Open() {
    metrics::DeclareAll(sink_);
    sink_.Set("build_info", 1, {{"version", build_.version}, {"revision", build_.revision}});
    sink_.Set("insecure_mode", config_.insecure ? 1 : 0, {});
    WW_ASSIGN(auto identity, OwnIdentity(config_));
    const Host host{io_, workers_, SystemClock(), sink_, std::move(identity)};
    if (!config_.etcd.empty()) {
      WW_FAIL_IF_ERROR(Leadership::CheckFiles(config_));
      leadership_.emplace(config_, io_, sink_);
      WW_FAIL_IF_ERROR(OpenHttp(host.identity));
      StopOnSignal();
      WW_ASSIGN(const bool leads, leadership_->Await());
      if (!leads) return false;
    }
    if (HasCoordinator(config_.role)) {
      WW_ASSIGN(coordinator_,
                CoordinatorRole::Start(config_, host, leadership_ ? &*leadership_ : nullptr));
      windows_->push_back(coordinator_->window());
    }
    if (HasAgent(config_.role)) {
      WW_ASSIGN(agent_, AgentRole::Start(config_, host, coordinator_.get()));
      windows_->push_back(agent_->window());
    }
    if (!http_) WW_FAIL_IF_ERROR(OpenHttp(host.identity));
    if (agent_ && !agent_->AwaitSession(kSessionWait)) {
      const std::string tried = fmt::format("{}", fmt::join(config_.coordinator, ", "));
      std::string why = agent_->SessionStatus().message();
      constexpr std::string_view kSaid = "no session with the coordinator: ";
      if (why.starts_with(kSaid)) why.erase(0, kSaid.size());
      spdlog::warn("no session with the coordinator {} yet: {}; the agent keeps trying",
                   tried.empty() ? "of this process" : tried, why);
    }
    WW_FAILPOINT("daemon.before_ready");
    // Before anybody can read that this process is ready: from here on a signal is a good stop.
    if (!signals_) StopOnSignal();
    return true;
  }

  std::string ReadyLine() const override {
    std::string out = "weightwired ready role=" + std::string(RoleName(config_.role));
    if (coordinator_) out += " grpc=" + coordinator_->address();
    if (http_acceptor_) out += " http=" + http_acceptor_->address();
    if (agent_) out += " agent=" + agent_->address();
    return out;
  }

  void Run() override {
    io_.run();
    signals_.reset();
  }

  void Stop() override {
    if (std::exchange(stopped_, true)) return;
    if (http_acceptor_) http_acceptor_->Close();
    if (http_) http_->CloseAll();
    if (agent_) agent_->Stop();
    if (coordinator_) coordinator_->Stop();
    coordinator_.reset();
    leadership_.reset();  // the next one need not wait until the lease ends
    workers_.Stop();
    spdlog::info("stopped");
  }

 private:
  void StopOnSignal() {
    signals_.emplace(io_, SIGTERM, SIGINT);
    signals_->async_wait([this](boost::system::error_code error, int signal) {
      if (error) return;
      spdlog::info("signal {}: shutting down", signal);
      io_.stop();
    });
  }

  Status OpenHttp(const std::optional<tls::Identity>& own) {
    if (config_.http.empty()) return OkStatus();
    if (config_.http_tls) {
      WW_ASSIGN_OR_STATUS(http_tls_, HttpTls::Make(TlsFilesOf(config_), *own, sink_));
    }
    http_ = HttpServer::Make(
        io_,
        Pages({windows_, HasCoordinator(config_.role), workers_, sink_, config_,
               [this] { return leadership_ ? leadership_->Standing() : OkStatus(); }}),
        http_tls_.get());
    WW_ASSIGN_OR_STATUS(http_acceptor_, rpc::Acceptor::ListenTcp(
                                            io_, config_.http, sink_,
                                            [this](memory::UniqueFd connection) {
                                              http_->Serve(std::move(connection));
                                            },
                                            rpc::Acceptor::kHealthPercent));
    return OkStatus();
  }

  const Config config_;
  const Build build_;
  metrics::PrometheusSink sink_;
  const rpc::GrpcLog grpc_log_{sink_};
  boost::asio::io_context io_{1};
  std::optional<boost::asio::signal_set> signals_;
  ThreadExecutor workers_;
  std::optional<Leadership> leadership_;  ///< with etcd; outlives the coordinator's journal
  /// Of the roles; a standby has none. Changes only while io_ does not run.
  const std::shared_ptr<std::vector<Window>> windows_ = std::make_shared<std::vector<Window>>();
  std::unique_ptr<CoordinatorRole> coordinator_;
  std::unique_ptr<AgentRole> agent_;
  std::unique_ptr<HttpTls> http_tls_;  ///< outlives http_; null: plaintext
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<rpc::Acceptor> http_acceptor_;
  bool stopped_ = false;
};

}  // namespace

Result<std::unique_ptr<Daemon>> Daemon::Start(const Config& config, const Build& build) {
  auto daemon = std::make_unique<DaemonImpl>(config, build);
  const Result<bool> opened = daemon->Open();
  if (!opened) {
    spdlog::critical("{}", opened.error().ToString());  // before what stops says so
    return Fail(opened.error());
  }
  if (!*opened) daemon.reset();
  return daemon;
}

}  // namespace weightwire::daemon
