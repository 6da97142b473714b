#include "server/agent/agent.h"

#include <deque>
#include <set>
#include <utility>

#include "server/agent/participant.h"
#include "server/agent/services.h"
#include "server/agent/session.h"
#include "server/base/failpoint.h"

// Two tables: handles that an application may still use, and participants that still run something
// (a fenced one stays there until it is drained). Calls go by handle; commands by member, which is
// what the coordinator of this session calls a participant.
namespace weightwire::agent {
namespace {

/// Of those who left: a place that nobody gave back is free when its lease has ended.
constexpr Nanos kLeftAtMost = std::chrono::seconds(60);
constexpr size_t kLeftMax = 1024;

control::AgentHello HelloOf(const Options& options) {
  control::AgentHello hello;
  hello.job = options.job;
  hello.name = options.name;
  hello.incarnation = options.incarnation;
  hello.host = options.host;
  hello.addresses = options.addresses;
  hello.features =
      control::kFeatureStale | control::kFeatureContentHash | control::kFeatureQuantize |
      control::kFeatureScaleRules | control::kFeatureFourBits | control::kFeatureOwnQuotient |
      control::kFeatureGather | control::kFeatureExclude | control::kFeatureAddressesOnce;
  return hello;
}

/// A caller of Attach gets an answer within this; clients give up after 30 s.
constexpr Nanos kAttachedWithin = std::chrono::seconds(20);

Status SessionWasLost() {
  return Status(Code::kUnavailable, Reason::kNotReady,
                "the session with the coordinator was lost meanwhile; attach again");
}

class AgentImpl final : public Agent {
 public:
  AgentImpl(Options options, Clock& clock, Executor& strand, Executor& workers,
            control::CoordinatorPort& coordinator, transfer::Engine& transfers,
            metrics::Sink& metrics)
      : services_(std::make_shared<Services>(std::move(options), clock, strand, workers,
                                             coordinator, transfers, metrics)),
        session_(
            HelloOf(services_->options), services_->options.reconnect, strand, coordinator, this,
            [this] { Opened(); }, [this] { return MakeBeat(); }) {
    services_->report = [this](epoch::Report report) { Report(std::move(report)); };
    services_->fenced = [this](Handle handle) { handles_.erase(handle); };
    services_->gone = [this](Handle handle) { Gone(handle); };
    services_->registered = [this](Handle handle, const epoch::Member& member) {
      members_[member] = handle;
    };
  }

  ~AgentImpl() override {
    services_->strand.Cancel(stale_timer_);
    for (const auto& [handle, participant] : running_) participant->Abandon();
    services_->report = [](const epoch::Report&) {};
    services_->fenced = [](Handle) {};
    services_->gone = [](Handle) {};
    services_->registered = [](Handle, const epoch::Member&) {};
  }

  void Start() override { session_.Start(); }
  Status SessionStatus() const override { return session_.status(); }

  void Attach(AttachRequest request, Application* application,
              control::Reply<AttachReply> reply) override;

  void SubmitLayout(Handle handle, control::LayoutSubmission submission,
                    control::Reply<control::LayoutReply> reply) override {
    auto participant = Find(handle);
    if (!participant) return reply(Fail(StaleHandle()));
    participant->SubmitLayout(std::move(submission), std::move(reply));
  }
  Result<uint64_t> ImportMemory(Handle handle, memory::UniqueFd fd, uint64_t bytes) override {
    auto participant = Find(handle);
    if (!participant) return Fail(StaleHandle());
    return participant->ImportMemory(std::move(fd), bytes);
  }
  Result<GpuAllocation> AllocateGpuMemory(Handle handle, uint64_t bytes) override {
    auto participant = Find(handle);
    if (!participant) return Fail(StaleHandle());
    return participant->AllocateGpuMemory(bytes);
  }
  Status Bind(Handle handle, const std::vector<TensorBinding>& bindings) override {
    auto participant = Find(handle);
    return participant ? participant->Bind(bindings) : StaleHandle();
  }
  Result<StageInfo> OpenStage(Handle handle) override {
    auto participant = Find(handle);
    if (!participant) return Fail(StaleHandle());
    return participant->OpenStage();
  }
  void Publish(Handle handle, PublishCall call, control::Done done) override {
    auto participant = Find(handle);
    if (!participant) return done(StaleHandle());
    participant->Publish(call, std::move(done));
  }
  void Withdraw(Handle handle, WithdrawCall call, control::Reply<Withdrawal> reply) override {
    auto participant = Find(handle);
    if (!participant) return reply(Fail(StaleHandle()));
    participant->Withdraw(call, std::move(reply));
  }
  Status AcknowledgeSwap(Handle handle, Epoch epoch, double flip_seconds) override {
    auto participant = Find(handle);
    return participant ? participant->AcknowledgeSwap(epoch, flip_seconds) : StaleHandle();
  }
  Status RefuseSwap(Handle handle, Epoch epoch, const std::string& why) override {
    auto participant = Find(handle);
    return participant ? participant->RefuseSwap(epoch, why) : StaleHandle();
  }
  Status MakeRoom(Handle handle, Epoch epoch) override {
    auto participant = Find(handle);
    return participant ? participant->MakeRoom(epoch) : StaleHandle();
  }
  Status CopyChecked(Handle handle, uint64_t verification, Status why) override {
    auto participant = Find(handle);
    return participant ? participant->CopyChecked(verification, std::move(why)) : StaleHandle();
  }
  void Detach(Handle handle, Status why) override {
    if (auto participant = Find(handle)) participant->Leave(std::move(why));
  }

  std::vector<LocalStatus> Local() const override {
    std::vector<LocalStatus> local;
    for (const auto& [handle, participant] : handles_) local.push_back(participant->Describe());
    return local;
  }

  void Shutdown(control::Done done) override;

  void OnCommand(epoch::Command command) override;
  void OnSessionLost(Status why) override;

 private:
  void Opened();
  std::shared_ptr<Participant> Find(Handle handle) const {
    auto found = handles_.find(handle);
    return found == handles_.end() ? nullptr : found->second;
  }
  control::Beat MakeBeat() const {
    control::Beat found{services_->options.refused(), {}};
    for (const auto& [handle, participant] : handles_) {
      if (auto receiving = participant->Receives()) found.receiving.push_back(*receiving);
      const int64_t pid = participant->pid();
      if (!services_->options.stopped(pid)) continue;
      const std::string process = std::to_string(pid);
      found.troubles.push_back({participant->member(), "its process " + process + " is stopped",
                                "kill -CONT " + process + " on its host, or end it"});
    }
    return found;
  }
  std::vector<std::shared_ptr<Participant>> Everyone() const {
    std::vector<std::shared_ptr<Participant>> everyone;
    for (const auto& [handle, participant] : running_) everyone.push_back(participant);
    return everyone;
  }
  Status AdmitAttach(const AttachRequest& request) const;
  void EndTheDeadAt(const AttachRequest& place);
  struct Attaching {
    AttachRequest request;
    Application* application = nullptr;
    control::RegisterRequest wanted;
    uint64_t session = 0;
    Nanos since{};
    control::Reply<AttachReply> reply;  ///< empty once it was called
  };
  void Register(Attaching attaching);
  bool RegistersAgain(const Attaching& attaching, const Status& why);
  void Registered(const Attaching& attaching, const Result<control::RegisterReply>& registered);
  void Report(epoch::Report report) {
    if (const auto* lost = std::get_if<epoch::LostReport>(&report)) NoteLeft(*lost);
    if (session_.status().ok()) {
      services_->coordinator.Report(session_.agent(), std::move(report));
    }
  }
  void Gone(Handle handle) {
    running_.erase(handle);
    std::erase_if(members_, [&](const auto& entry) { return entry.second == handle; });
    EndShutdownWhenIdle();
  }
  void EndShutdownWhenIdle();
  void NoteLeft(const epoch::LostReport& lost) {
    left_.emplace_back(services_->clock.Now(), lost);
    if (left_.size() > kLeftMax) left_.pop_front();
  }
  void TellWhoLeft();
  void FenceTheStale();

  const std::shared_ptr<Services> services_;
  Session session_;
  JournalId history_{};  ///< of the session before this one
  std::map<Handle, std::shared_ptr<Participant>> handles_;
  std::map<Handle, std::shared_ptr<Participant>> running_;
  std::map<epoch::Member, Handle> members_;  ///< as this session knows them
  uint64_t next_handle_ = 1;
  uint32_t attaching_ = 0;
  /// Who left lately: what was said of it may have been lost with a session.
  std::deque<std::pair<Nanos, epoch::LostReport>> left_;
  Executor::TimerId stale_timer_ = 0;
  bool shutting_down_ = false;
  std::vector<control::Done> shutdown_waiters_;
  std::shared_ptr<AgentImpl*> self_ = std::make_shared<AgentImpl*>(this);
};

Status AgentImpl::AdmitAttach(const AttachRequest& request) const {
  if (shutting_down_) {
    return Status(Code::kUnavailable, Reason::kShuttingDown, "the agent is shutting down");
  }
  WW_RETURN_IF_ERROR(session_.status());
  if (request.incarnation.value == 0) {
    return Status(Code::kInvalidArgument, Reason::kInvalidRequest, "the incarnation must not be 0");
  }
  if (handles_.size() + attaching_ >= services_->options.participants_max) {
    return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                  "the agent serves " + std::to_string(handles_.size() + attaching_) +
                      " participants already, its limit");
  }
  const memory::GpuMemoryPools& gpu_pools = services_->options.gpu_pools;
  if (!gpu_pools.required || !request.device) return OkStatus();
  const auto pool = gpu_pools.Of(*request.device);
  return pool ? OkStatus() : pool.error();
}

void AgentImpl::Attach(AttachRequest request, Application* application,
                       control::Reply<AttachReply> reply) {
  if (Status status = AdmitAttach(request); !status.ok()) return reply(Fail(std::move(status)));
  if (request.job.empty()) request.job = services_->options.job;
  control::RegisterRequest wanted{
      session_.agent(),   request.job,         request.role, request.group,    request.rank,
      request.world_size, request.incarnation, request.pid,  request.trace_id, {},
      request.previous};
  EndTheDeadAt(request);
  ++attaching_;
  Register({std::move(request), application, std::move(wanted), session_.number(),
            services_->clock.Now(), std::move(reply)});
}

/// A process that has ended holds its place until its stream has: longer than it takes to start
/// the next one, and for as long as a child lives that has its sockets.
void AgentImpl::EndTheDeadAt(const AttachRequest& place) {
  for (const auto& participant : Everyone()) {
    if (!participant->Holds(place.job, place.group, place.rank)) continue;
    if (!services_->options.process_ended(participant->pid())) continue;
    participant->Dismiss(Status(Code::kUnavailable, Reason::kMemberLost,
                                "process " + std::to_string(participant->pid()) + " has ended"));
  }
}

void AgentImpl::Register(Attaching attaching) {
  WW_FAILPOINT("agent.before_an_attachment_registers");
  control::RegisterRequest wanted = attaching.wanted;
  services_->coordinator.Register(std::move(wanted),
                                  [weak = std::weak_ptr(self_), attaching = std::move(attaching)](
                                      const Result<control::RegisterReply>& registered) {
                                    if (auto self = weak.lock())
                                      (*self)->Registered(attaching, registered);
                                  });
}

/// The place may have been taken by a call whose answer was lost. Only the same call finds out: it
/// is repeated as long as the session lasts, also when its application was told to try again.
bool AgentImpl::RegistersAgain(const Attaching& attaching, const Status& why) {
  if (shutting_down_ || attaching.session != session_.number()) return false;
  if (why.code() != Code::kUnavailable && why.code() != Code::kDeadlineExceeded) return false;
  Attaching again = attaching;
  if (again.reply && services_->clock.Now() - again.since >= kAttachedWithin) {
    std::exchange(again.reply, {})(Fail(Status(why)));
  }
  services_->strand.PostAfter(services_->options.reconnect,
                              [weak = std::weak_ptr(self_), again = std::move(again)] {
                                auto self = weak.lock();
                                if (!self) return;
                                if (again.session == (*self)->session_.number())
                                  return (*self)->Register(again);
                                (*self)->Registered(again, Fail(SessionWasLost()));
                              });
  return true;
}

void AgentImpl::Registered(const Attaching& attaching,
                           const Result<control::RegisterReply>& registered) {
  if (!registered && RegistersAgain(attaching, registered.error())) return;
  --attaching_;
  const AttachRequest& request = attaching.request;
  const auto& reply = attaching.reply;
  if (!reply) {
    if (registered) {
      Report(epoch::LostReport{
          registered->member, Status(Code::kAborted, Reason::kMemberLost, "nobody waited for it")});
    }
    return;
  }
  if (!registered) return reply(Fail(registered.error()));
  if (shutting_down_ || attaching.session != session_.number()) {
    // Its place is kept for it; nobody else would give it back.
    Report(epoch::LostReport{registered->member, Status(Code::kAborted, Reason::kMemberLost,
                                                        "its attachment was not finished")});
    return reply(Fail(SessionWasLost()));
  }
  const epoch::Member& member = registered->member;
  if (members_.contains(member)) {
    return reply(Fail(
        Status(Code::kAlreadyExists, Reason::kDuplicateRank, "this incarnation is attached already")
            .AtRank(request.group + "/" + std::to_string(request.rank))));
  }
  WW_FAILPOINT("agent.after_register_before_attached");
  const Handle handle{next_handle_++};
  auto participant =
      std::make_shared<Participant>(services_, handle, request, member, attaching.application);
  handles_.emplace(handle, participant);
  running_.emplace(handle, std::move(participant));
  members_.emplace(member, handle);
  AttachReply attached{handle, member, OkStatus(), registered->lineage, registered->floor};
  if (request.device) {
    const auto pool = services_->options.gpu_pools.Of(*request.device);
    if (!pool) attached.device = pool.error();
  }
  reply(std::move(attached));
}

void AgentImpl::OnCommand(epoch::Command command) {
  const epoch::Member member = std::visit([](const auto& c) { return c.member; }, command);
  if (auto found = members_.find(member); found != members_.end()) {
    const auto participant = running_.at(found->second);
    return participant->OnCommand(std::move(command));
  }
  // Nobody here: the sender of a command that has an answer must not wait for its deadline.
  std::visit(
      [&](const auto& c) {
        using T = std::decay_t<decltype(c)>;
        if constexpr (std::is_same_v<T, epoch::PrepareCommand> ||
                      std::is_same_v<T, epoch::TransferCommand> ||
                      std::is_same_v<T, epoch::CommitCommand> ||
                      std::is_same_v<T, epoch::AbortCommand>) {
          Report(epoch::FailedReport{c.epoch, member, StaleHandle()});
        }
        if constexpr (std::is_same_v<T, epoch::HashCommand>) {
          Report(epoch::HashedReport{c.content, member, c.verification, StaleHandle(), {}, 0});
        }
      },
      command);
}

void AgentImpl::OnSessionLost(Status why) {
  session_.Lost(why);
  members_.clear();
  for (const auto& participant : Everyone()) participant->Orphan();
  if (services_->options.stale_after <= Nanos(0) || stale_timer_ != 0) return;
  stale_timer_ =
      services_->strand.PostAfter(services_->options.stale_after, [weak = std::weak_ptr(self_)] {
        if (auto self = weak.lock()) (*self)->FenceTheStale();
      });
}

void AgentImpl::FenceTheStale() {
  stale_timer_ = 0;
  const auto seconds =
      std::chrono::duration_cast<std::chrono::seconds>(services_->options.stale_after);
  const Status why = Status(Code::kAborted, Reason::kStaleEpoch,
                            "there was no coordinator for " + std::to_string(seconds.count()) +
                                " s, the agent's stale_after")
                         .Remedy("attach again; the engine is filled when the coordinator is back");
  for (const auto& participant : Everyone()) {
    if (participant->is_engine()) participant->Dismiss(why);
  }
}

void AgentImpl::TellWhoLeft() {
  const Nanos since = services_->clock.Now() - kLeftAtMost;
  for (const auto& [at, lost] : left_) {
    if (at >= since) services_->coordinator.Report(session_.agent(), lost);
  }
}

void AgentImpl::Opened() {
  const JournalId before = std::exchange(history_, session_.history());
  const bool same = history_ != JournalId{} && history_ == before;
  services_->strand.Cancel(std::exchange(stale_timer_, 0));
  if (same) TellWhoLeft();
  for (const auto& participant : Everyone()) {
    if (same) {
      participant->Rejoin(session_.agent());
      continue;
    }
    participant->OnCommand(epoch::EvictCommand{
        participant->member(),
        Status(Code::kAborted, Reason::kStaleIncarnation,
               "the coordinator was lost, and the one that is there now knows nothing of it")
            .Remedy("attach again with a new incarnation; a coordinator with a journal on disk "
                    "takes its participants over")});
  }
}

void AgentImpl::Shutdown(control::Done done) {
  shutting_down_ = true;
  shutdown_waiters_.push_back(std::move(done));
  const Status why(Code::kUnavailable, Reason::kShuttingDown, "the agent is shutting down");
  for (const auto& participant : Everyone()) participant->Dismiss(why);
  EndShutdownWhenIdle();
}

void AgentImpl::EndShutdownWhenIdle() {
  if (!shutting_down_ || !running_.empty()) return;
  session_.Close();
  for (auto& waiter : std::exchange(shutdown_waiters_, {})) waiter(OkStatus());
}

}  // namespace

std::unique_ptr<Agent> Agent::Make(Options options, Clock& clock, Executor& strand,
                                   Executor& workers, control::CoordinatorPort& coordinator,
                                   transfer::Engine& transfers, metrics::Sink& metrics) {
  return std::make_unique<AgentImpl>(std::move(options), clock, strand, workers, coordinator,
                                     transfers, metrics);
}

}  // namespace weightwire::agent
