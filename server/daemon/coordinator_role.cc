#include "server/daemon/coordinator_role.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "server/base/strand_call.h"
#include "server/daemon/coordinator_gauges.h"
#include "server/daemon/directories.h"
#include "server/daemon/pages.h"
#include "server/daemon/status_documents.h"
#include "server/daemon/tls_setup.h"
#include "server/rpc/authorizer.h"
#include "server/rpc/log_fields.h"
#include "server/rpc/random.h"
#include "server/store/sqlite_journal.h"

namespace weightwire::daemon {
namespace {

constexpr char kServiceName[] = "weightwire.v1.Coordinator";
constexpr std::chrono::milliseconds kDrainLimit(1'500);
constexpr std::chrono::milliseconds kCallsLimit(300);

coordinator::Options OptionsOf(const Config& config) {
  using std::chrono::milliseconds;
  coordinator::Options out;
  out.job = config.job;
  out.heartbeat = milliseconds(config.heartbeat_ms);
  out.lease = milliseconds(config.lease_ms);
  out.prepare_deadline = milliseconds(config.prepare_deadline_ms);
  out.transfer_deadline = milliseconds(config.transfer_deadline_ms);
  out.staged_deadline = milliseconds(config.staged_deadline_ms);
  out.commit_deadline = milliseconds(config.commit_deadline_ms);
  out.abort_deadline = milliseconds(config.abort_deadline_ms);
  out.fanout = config.fanout;
  out.slot_bytes = static_cast<int64_t>(config.slot_bytes);
  out.min_engines = config.min_engines;
  out.commit_policy = {config.commit_policy, config.commit_quorum,
                       milliseconds(config.laggard_grace_ms)};
  out.rollback_refused = config.rollback_refused;
  out.attempts_max = config.attempts_max;
  out.members_max = config.members_max;
  out.verify_every = config.verify_every;
  out.notes = rpc::LogNote;
  out.random_ticket = [] {
    Ticket ticket;
    rpc::RandomBytes(ticket.data(), ticket.size());
    return ticket;
  };
  return out;
}

}  // namespace

Result<std::unique_ptr<CoordinatorRole>> CoordinatorRole::Start(const Config& config,
                                                                const Host& host,
                                                                Leadership* leadership) {
  std::unique_ptr<CoordinatorRole> role(new CoordinatorRole());
  WW_FAIL_IF_ERROR(role->OpenJournal(config, host, leadership));
  auto made = OnStrand(role->strand_, [&] {
    return coordinator::Coordinator::Make(OptionsOf(config), host.clock, role->strand_,
                                          host.workers, *role->journal_, host.metrics);
  });
  if (!made) return Fail(std::move(made.error()));
  role->coordinator_ = std::move(*made);
  WW_FAIL_IF_ERROR(role->Serve(config, host));
  return role;
}

CoordinatorRole::~CoordinatorRole() { Stop(); }

Status CoordinatorRole::OpenJournal(const Config& config, const Host& host,
                                    Leadership* leadership) {
  if (leadership != nullptr) {
    journal_ = leadership->OpenJournal(strand_, host.metrics);
    return OkStatus();
  }
  host.metrics.Set("leader", 1);
  std::string path;
  if (config.state_dir.empty()) {
    spdlog::warn("no state_dir: commits are kept in memory and lost when this process ends");
  } else {
    WW_RETURN_IF_ERROR(MakePrivateDirectory(config.state_dir));
    path = config.state_dir + "/journal.sqlite";
  }
  const Nanos start = host.clock.Now();
  WW_ASSIGN_OR_STATUS(journal_, store::SqliteJournal::Open(path, strand_, host.metrics));
  host.metrics.Set("journal_recovery_seconds",
                   std::chrono::duration<double>(host.clock.Now() - start).count());
  return OkStatus();
}

Status CoordinatorRole::Serve(const Config& config, const Host& host) {
  const auto message_bytes_max = static_cast<size_t>(config.message_bytes_max);
  rpc::Runtime runtime{strand_, host.clock, host.metrics, message_bytes_max};
  if (!config.token_key.empty()) {
    runtime.tokens = std::make_shared<tls::TokenKeys>(config.token_key);
    WW_RETURN_IF_ERROR(runtime.tokens->Check());
  }
  service_ = rpc::CoordinatorService::Make(runtime, *coordinator_);
  communicator_service_ = rpc::CommunicatorService::Make(runtime, communicators_);
  rpc::GrpcServer::Options options{message_bytes_max, nullptr};
  if (host.identity) {
    options.credentials =
        rpc::GuardedCredentials(TlsFilesOf(config), *host.identity, runtime.tokens, host.metrics);
  }
  WW_ASSIGN_OR_STATUS(
      server_, rpc::GrpcServer::Start(std::move(options),
                                      {service_->service(), communicator_service_->service()}));
  WW_ASSIGN_OR_STATUS(acceptor_,
                      rpc::Acceptor::ListenTcp(host.io, config.listen, host.metrics,
                                               [this](memory::UniqueFd connection) {
                                                 server_->HandOver(std::move(connection));
                                               }));
  OnStrand(strand_, [this] {
    auto tell = [this] { server_->SetServing(kServiceName, coordinator_->Ready()); };
    tell();
    coordinator_->Watch(tell);
  });
  return OkStatus();
}

Window CoordinatorRole::window() {
  return {
      &strand_,
      [this] {
        const Status status = coordinator_->Readiness();
        if (status.ok()) return status;
        return Status(status.code(), status.reason(), "coordinator: " + status.message())
            .Remedy(std::string(status.remedy()));
      },
      [this] {
        constexpr size_t kEpochsShown = 20;
        return CoordinatorPage(coordinator_->Snapshot(
            {.epochs_max = kEpochsShown, .names_bounded = false, .participants_max = 0}));
      },
      {{kStatusDocument,
        [this] {
          return WriteDocument([snapshot = coordinator_->Snapshot(StatusDocumentQuery())] {
            return StatusDocument(snapshot);
          });
        }},
       {kPageDocument,
        [this] {
          return WriteDocument([snapshot = coordinator_->Snapshot(PageDocumentQuery())] {
            return PageDocument(snapshot);
          });
        }},
       {kPlansDocument,
        [this] {
          return WriteDocument(
              [plans = NewestPlans(*coordinator_)] { return PlansDocument(plans); });
        }},
       {kLinksDocument,
        [this] {
          return WriteDocument([links = coordinator_->Edges()] { return LinksDocument(links); });
        }}},
      [this] {
        return SetGauges(
            [snapshot = coordinator_->Snapshot(GaugesQuery())](metrics::PrometheusSink& sink) {
              SetCoordinatorGauges(snapshot, sink);
            });
      }};
}

void CoordinatorRole::Stop() {
  if (acceptor_) acceptor_->Close();
  if (coordinator_) {
    const bool drained = AwaitOnStrand(
        strand_, kDrainLimit, [this](auto done) { coordinator_->Shutdown(std::move(done)); });
    if (!drained) spdlog::warn("the coordinator did not drain in time");
    OnStrand(strand_, [this] { communicators_.Shutdown(); });
  }
  const Status why(Code::kUnavailable, Reason::kShuttingDown, "the coordinator is shutting down");
  if (service_) service_->EndStreams(why);
  if (server_) server_->Shutdown(kCallsLimit);
  if (coordinator_) OnStrand(strand_, [this] { coordinator_.reset(); });
  strand_.Stop();
}

}  // namespace weightwire::daemon
