#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/transfer/context.h"
#include "server/transfer/sessions.h"
#include "server/transfer/source_run.h"
#include "server/transfer/staging.h"
#include "server/transfer/target_run.h"
#include "server/transfer/transfer.h"

// Routing only: messages go to the run that their key names, jobs to runs, runs to their end. The
// Core is what transports and posted tasks refer to, so that a late one finds it alive.
namespace weightwire::transfer {
namespace {

using EndpointPtr = std::shared_ptr<transport::Endpoint>;
using JobName = std::pair<Epoch, ParticipantId>;

constexpr size_t kEarlyOpensMax = 16'384;
constexpr size_t kPastSourcesMax = 1'024;
constexpr uint64_t kPageBytes = 4'096;

Status Refusal(Code code, Reason reason, std::string message) {
  return Status(code, reason, std::move(message));
}

// Runs `all` at the `count`-th call.
std::function<void()> Join(size_t count, std::function<void()> all) {
  return [left = std::make_shared<size_t>(count), all = std::move(all)] {
    if (--*left == 0) all();
  };
}

class Core final : public transport::Handler, public std::enable_shared_from_this<Core> {
 public:
  explicit Core(std::shared_ptr<Context> context)
      : context_(std::move(context)), sessions_(std::make_shared<SessionTable>(context_)) {}

  // Transports' threads.
  Result<Ticket> OnHello(const transport::CallerHello& said) override {
    return context_->tickets.Check(said);
  }
  void OnAccepted(EndpointPtr endpoint) override;
  void OnNotify(const EndpointPtr& endpoint, std::span<const std::byte> message) override;
  void OnClosed(const EndpointPtr& endpoint, const Status& why) override;

  // The strand.
  void WithdrawTicket(const Ticket& ticket, Incarnation caller);
  void StartSource(SourceJob job, Engine::SourceDone done);
  void StartTarget(TargetJob job, Engine::TargetDone done);
  void Exclude(JobName name, const PlanId& plan, const std::vector<ParticipantId>& readers);
  void Drain(JobName name, std::function<void()> drained);
  Engine::Progress ProgressOf(JobName name) const;
  void Shutdown(std::function<void()> done);
  Context& context() { return *context_; }

 private:
  void Route(const EndpointPtr& endpoint, const Notify& notify);
  void RouteOpen(const EndpointPtr& endpoint, const Notify& open);
  void EndSessionOf(const EndpointPtr& endpoint, const Status& why);
  void Refuse(const EndpointPtr& endpoint, const Notify& open, Code code, Reason reason);
  void ForgetSource(JobName name);
  std::shared_ptr<SourceRun> FindSource(JobName name) const;
  std::shared_ptr<TargetRun> FindTarget(JobName name) const;

  std::shared_ptr<Context> context_;
  std::shared_ptr<SessionTable> sessions_;
  std::map<JobName, std::shared_ptr<SourceRun>> sources_;
  std::map<JobName, std::shared_ptr<TargetRun>> targets_;
  std::vector<std::pair<EndpointPtr, Notify>> early_opens_;  ///< before their StartSource
  std::set<JobName> past_sources_;  ///< the latest, so that a late OPEN is answered at once
  std::deque<JobName> past_order_;
  bool shutting_down_ = false;
};

// ---- transports' threads
// -------------------------------------------------------------------------

void Core::OnAccepted(EndpointPtr endpoint) {
  context_->strand.Post([self = shared_from_this(), endpoint = std::move(endpoint)] {
    self->sessions_->OnAccepted(endpoint);
  });
}

void Core::OnNotify(const EndpointPtr& endpoint, std::span<const std::byte> message) {
  auto notify = DecodeNotify(message);
  if (!notify.has_value()) return endpoint->Close();
  context_->strand.Post(
      [self = shared_from_this(), endpoint, notify = *notify] { self->Route(endpoint, notify); });
}

void Core::OnClosed(const EndpointPtr& endpoint, const Status& why) {
  context_->strand.Post(
      [self = shared_from_this(), endpoint, why] { self->EndSessionOf(endpoint, why); });
}

// ---- messages
// ------------------------------------------------------------------------------------

void Core::Route(const EndpointPtr& endpoint, const Notify& notify) {
  const JobName source(notify.key.epoch, notify.key.source);
  switch (notify.type) {
    case NotifyType::kOpen:
      return RouteOpen(endpoint, notify);
    case NotifyType::kCredit:
      if (auto run = FindSource(source)) run->OnCredit(endpoint, notify);
      return;
    case NotifyType::kClose:
      std::erase_if(early_opens_, [&](const auto& early) {
        return early.first == endpoint && early.second.key == notify.key;
      });
      if (auto run = FindSource(source)) run->OnClose(endpoint, notify);
      return;
    case NotifyType::kBinding:
    case NotifyType::kReady:
    case NotifyType::kFail:
    case NotifyType::kWaiting:
    case NotifyType::kDelta:
      if (auto run = FindTarget({notify.key.epoch, notify.key.reader})) {
        run->OnNotify(endpoint, notify);
      }
      return;
  }
}

void Core::RouteOpen(const EndpointPtr& endpoint, const Notify& open) {
  if (!context_->tickets.Knows(endpoint->hello().caller)) {
    return Refuse(endpoint, open, Code::kUnauthenticated, Reason::kTicketRejected);
  }
  const JobName name(open.key.epoch, open.key.source);
  if (auto run = FindSource(name)) return run->OnOpen(endpoint, open);
  if (shutting_down_) return Refuse(endpoint, open, Code::kUnavailable, Reason::kShuttingDown);
  if (past_sources_.contains(name)) {
    return Refuse(endpoint, open, Code::kAborted, Reason::kStaleEpoch);
  }
  if (early_opens_.size() == kEarlyOpensMax) {
    return Refuse(endpoint, open, Code::kResourceExhausted, Reason::kLimitExceeded);
  }
  early_opens_.emplace_back(endpoint, open);
}

void Core::Refuse(const EndpointPtr& endpoint, const Notify& open, Code code, Reason reason) {
  Notify fail;
  fail.type = NotifyType::kFail;
  fail.key = open.key;
  fail.code = code;
  fail.reason = reason;
  context_->Send(endpoint, fail);
}

void Core::EndSessionOf(const EndpointPtr& endpoint, const Status& why) {
  std::erase_if(early_opens_, [&](const auto& early) { return early.first == endpoint; });
  // Runs that end take themselves out of the maps.
  for (const auto& entry : std::map(sources_)) entry.second->OnSessionLost(endpoint->id(), why);
  for (const auto& entry : std::map(targets_)) entry.second->OnSessionLost(endpoint->id(), why);
  context_->notifies->Forget(endpoint->id());
  sessions_->OnClosed(endpoint);
  context_->egress.Forget(endpoint->hello().caller);
  context_->ingress.Forget(endpoint->hello().callee);
}

void Core::WithdrawTicket(const Ticket& ticket, Incarnation caller) {
  context_->tickets.Withdraw(ticket, caller);
  if (context_->tickets.Knows(caller)) return;
  std::erase_if(early_opens_, [&](const auto& early) {
    if (early.first->hello().caller != caller) return false;
    Refuse(early.first, early.second, Code::kUnauthenticated, Reason::kTicketRejected);
    return true;
  });
}

// ---- jobs
// ----------------------------------------------------------------------------------------

std::shared_ptr<SourceRun> Core::FindSource(JobName name) const {
  auto entry = sources_.find(name);
  return entry == sources_.end() ? nullptr : entry->second;
}
std::shared_ptr<TargetRun> Core::FindTarget(JobName name) const {
  auto entry = targets_.find(name);
  return entry == targets_.end() ? nullptr : entry->second;
}

// Why a job cannot start; OK when it can.
Status CheckStart(bool shutting_down, bool known) {
  if (shutting_down) {
    return Refusal(Code::kUnavailable, Reason::kShuttingDown, "this agent is shutting down");
  }
  if (known) {
    return Refusal(Code::kAlreadyExists, Reason::kInvalidRequest,
                   "the participant has a job in this epoch already");
  }
  return OkStatus();
}

void Core::StartSource(SourceJob job, Engine::SourceDone done) {
  const JobName name(job.epoch, job.participant);
  if (Status status = CheckStart(shutting_down_, sources_.contains(name)); !status.ok()) {
    context_->strand.Post([done = std::move(done), status] { done(Fail(status)); });
    return;
  }
  auto run =
      std::make_shared<SourceRun>(context_, std::move(job), std::move(done),
                                  [self = shared_from_this(), name] { self->ForgetSource(name); });
  sources_.emplace(name, run);
  run->Start();
  std::erase_if(early_opens_, [&](const auto& early) {
    const StreamKey& key = early.second.key;
    if (key.epoch != name.first || key.source != name.second) return false;
    run->OnOpen(early.first, early.second);
    return true;
  });
}

void Core::StartTarget(TargetJob job, Engine::TargetDone done) {
  const JobName name(job.epoch, job.participant);
  if (Status status = CheckStart(shutting_down_, targets_.contains(name)); !status.ok()) {
    context_->strand.Post([done = std::move(done), status] { done(Fail(status)); });
    return;
  }
  auto run = std::make_shared<TargetRun>(
      context_, sessions_, std::move(job), std::move(done),
      [self = shared_from_this(), name] { self->targets_.erase(name); });
  targets_.emplace(name, run);
  run->Start();
}

void Core::ForgetSource(JobName name) {
  sources_.erase(name);
  if (!past_sources_.insert(name).second) return;
  past_order_.push_back(name);
  if (past_order_.size() <= kPastSourcesMax) return;
  past_sources_.erase(past_order_.front());
  past_order_.pop_front();
}

void Core::Exclude(JobName name, const PlanId& plan, const std::vector<ParticipantId>& readers) {
  if (auto run = FindSource(name)) run->Exclude(plan, readers);
}

void Core::Drain(JobName name, std::function<void()> drained) {
  const auto source = FindSource(name);
  const auto target = FindTarget(name);
  if (!source && !target) return context_->strand.Post(std::move(drained));
  const auto one = Join(size_t{source != nullptr} + size_t{target != nullptr}, std::move(drained));
  if (source) source->Drain(one);
  if (target) target->Drain(one);
}

Engine::Progress Core::ProgressOf(JobName name) const {
  if (auto run = FindTarget(name)) return run->progress();
  if (auto run = FindSource(name)) return run->progress();
  return {};
}

void Core::Shutdown(std::function<void()> done) {
  shutting_down_ = true;
  context_->tickets.ShutDown();
  for (const auto& [endpoint, open] : std::exchange(early_opens_, {})) {
    Refuse(endpoint, open, Code::kUnavailable, Reason::kShuttingDown);
  }
  std::set<JobName> names;
  for (const auto& entry : sources_) names.insert(entry.first);
  for (const auto& entry : targets_) names.insert(entry.first);
  const auto close = [self = shared_from_this(), done = std::move(done)] {
    self->sessions_->CloseAll(done);
  };
  if (names.empty()) return context_->strand.Post(close);
  const auto one = Join(names.size(), close);
  for (const JobName& name : names) Drain(name, one);
}

// ---- the engine
// ----------------------------------------------------------------------------------

class EngineImpl final : public Engine {
 public:
  explicit EngineImpl(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  void AdmitTicket(const Ticket& ticket, Incarnation caller) override {
    core_->context().tickets.Admit(ticket, caller);
  }
  void WithdrawTicket(const Ticket& ticket, Incarnation caller) override {
    core_->WithdrawTicket(ticket, caller);
  }
  void StartSource(SourceJob job, SourceDone done) override {
    core_->StartSource(std::move(job), std::move(done));
  }
  void StartTarget(TargetJob job, TargetDone done) override {
    core_->StartTarget(std::move(job), std::move(done));
  }
  void Exclude(Epoch epoch, ParticipantId participant, const PlanId& plan,
               const std::vector<ParticipantId>& readers) override {
    core_->Exclude({epoch, participant}, plan, readers);
  }
  void Drain(Epoch epoch, ParticipantId participant, std::function<void()> drained) override {
    core_->Drain({epoch, participant}, std::move(drained));
  }
  Progress ProgressOf(Epoch epoch, ParticipantId participant) const override {
    return core_->ProgressOf({epoch, participant});
  }
  void Shutdown(std::function<void()> done) override { core_->Shutdown(std::move(done)); }

 private:
  std::shared_ptr<Core> core_;
};

Status CheckTuning(const Tuning& tuning) {
  struct Least {
    const char* key;
    int64_t value, least;
  };
  const Least all[] = {{"segment_bytes_max", tuning.segment_bytes_max, 8},
                       {"slots_in_pool", tuning.slots_in_pool, 1},
                       {"window", tuning.window, 1},
                       {"mapped_window", tuning.mapped_window, 1},
                       {"chunk_bytes", tuning.chunk_bytes, 1},
                       {"gets_in_flight", tuning.gets_in_flight, 1},
                       {"near_chunk_bytes", tuning.near_chunk_bytes, 1},
                       {"near_gets_in_flight", tuning.near_gets_in_flight, 1},
                       {"direct_run_bytes_min", tuning.direct_run_bytes_min, 1},
                       {"through_run_bytes_min", tuning.through_run_bytes_min, 1},
                       {"rereads_max", tuning.rereads_max, 0}};
  const auto refused = [](const std::string& what) {
    return Status(Code::kInvalidArgument, Reason::kConfigInvalid, what);
  };
  for (const auto& [key, value, least] : all) {
    if (value >= least) continue;
    return refused(std::string(key) + " is " + std::to_string(value) + ", and at least " +
                   std::to_string(least));
  }
  if (tuning.slot_bytes < tuning.segment_bytes_max + 128) {
    return refused("slot_bytes is " + std::to_string(tuning.slot_bytes) +
                   ", and at least segment_bytes_max + 128");
  }
  if (tuning.slot_bytes % static_cast<int64_t>(kPageBytes) != 0) {
    return refused("slot_bytes is " + std::to_string(tuning.slot_bytes) +
                   ", which is no multiple of " + std::to_string(kPageBytes));
  }
  for (const auto& [key, rate] : {std::pair("rate_limit", tuning.rate_limit),
                                  std::pair("peer_rate_limit", tuning.peer_rate_limit)}) {
    if (rate == 0 || rate >= static_cast<uint64_t>(tuning.slot_bytes)) continue;
    return refused(std::string(key) + " is " + std::to_string(rate) +
                   " bytes a second: 0 for none, or at least slot_bytes, " +
                   std::to_string(tuning.slot_bytes));
  }
  return OkStatus();
}

// A Get carries whole segments, or all sums of a slot (one for each 64 bytes of it at most).
Status CheckChunks(const transport::Transport& transport, const Tuning& tuning) {
  const uint64_t most = transport.capabilities().chunk_bytes_max;
  const auto part =
      static_cast<uint64_t>(std::max(tuning.segment_bytes_max, tuning.slot_bytes / 8));
  if (most == 0 || part <= most) return OkStatus();
  return Status(Code::kInvalidArgument, Reason::kConfigInvalid,
                "transport " + transport.name() + " reads at most " + std::to_string(most) +
                    " bytes at once, a segment or a slot's sums take " + std::to_string(part));
}

Status CheckGpuPools(const GpuPoolMap& all) {
  if (all.empty()) {
    return Refusal(Code::kFailedPrecondition, Reason::kTransportFailed,
                   "gpu_direct is required, but no transport here reaches GPU memory");
  }
  for (const auto& [device, pools] : all) WW_RETURN_IF_ERROR(pools.missing);
  return OkStatus();
}

Result<std::unique_ptr<memory::SlotPool>> MakePool(const std::string& name, const PoolSize& size) {
  return memory::SlotPool::Make(name, size.slot_bytes, size.slots);
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::Make(Options options, Clock& clock, Executor& strand,
                                             Executor& workers,
                                             std::vector<transport::Transport*> transports,
                                             metrics::Sink& metrics) {
  const Tuning tuning = options.tuning;
  WW_FAIL_IF_ERROR(CheckTuning(tuning));
  auto context = std::make_shared<Context>(std::move(options), clock, strand, workers, metrics);
  WW_ASSIGN(context->slots, MakePool("slots", SlotPoolSize(tuning)));
  WW_ASSIGN(context->scratch, MakePool("scratch", ScratchPoolSize(tuning)));
  bool reaches_gpus = false;
  auto core = std::make_shared<Core>(context);
  for (transport::Transport* transport : transports) {
    if (!transport->Viable().ok()) continue;
    WW_FAIL_IF_ERROR(CheckChunks(*transport, tuning));
    context->transports.emplace(transport->name(), transport);
    reaches_gpus |= transport->capabilities().gets_device_memory;
  }
  if (reaches_gpus) context->gpu_pools = MakeGpuPools(context->options.gpu_pools, tuning);
  if (context->options.gpu_direct_required) WW_FAIL_IF_ERROR(CheckGpuPools(context->gpu_pools));
  if (context->transports.empty()) {
    return Fail(Code::kFailedPrecondition, Reason::kTransportFailed,
                "no data-plane transport runs on this host");
  }
  for (const auto& [name, transport] : context->transports) {
    WW_FAIL_IF_ERROR(transport->Start(core.get(), context->options.self));
  }
  return std::make_unique<EngineImpl>(std::move(core));
}

}  // namespace weightwire::transfer
