#pragma once

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/executor.h"
#include "server/base/note.h"
#include "server/control/control.h"
#include "server/memory/gpu_memory_pool.h"
#include "server/memory/stage_store.h"
#include "server/metrics/metrics.h"
#include "server/transfer/transfer.h"

/// The sidecar: local participants, their memory and stages, their transfers. A library, so that it
/// can be embedded in an application process.
namespace weightwire::agent {

/// A local participant. Never 0; never reused.
using Handle = StrongId<struct HandleTag, uint64_t>;

enum class PublishMode : int {
  kHold = 1,      ///< parameters stay unchanged until released
  kSnapshot = 2,  ///< the agent copies the shard first; released right after the copy
};

struct PublishCall {
  Version version{};
  PublishMode mode = PublishMode::kHold;
  bool manual_commit = false;
  Nanos deadline{};
  std::array<uint8_t, 16> trace_id{};
  uint64_t number = 0;   ///< counts the application's calls, from 1; 0: it does not count
  uint64_t lineage = 1;  ///< the rank's, the same in every call
  /// Indices of tensors to which nothing was written since the last call that was answered with OK:
  /// what was summed of them is not read again to be summed.
  std::vector<uint32_t> unchanged = {};
};
/// The application does not wait for the answer to a call, or for the release, any more.
struct WithdrawCall {
  Version version{};
  uint64_t number = 0;       ///< this call and earlier ones; 0: all that came
  bool if_accepted = false;  ///< also when the coordinator has accepted the version
};
/// What became of the version's bytes. Values are the protocol's.
enum class Withdrawal : int {
  kRevoked = 1,   ///< nothing reads them, or ever will; OnReleased does not come
  kAccepted = 2,  ///< accepted, and not to be taken back then: OnReleased comes
  kRead = 3,      ///< all were read, none is read again; OnReleased says how it ended
  kReleased = 4,  ///< OnReleased has come
};

/// What the agent tells the application process. Called on the agent's strand; must not block.
class Application {
 public:
  virtual ~Application() = default;
  /// The publisher may change its parameters; `why` not OK: the version was given up.
  virtual void OnReleased(Version version, Epoch epoch, const Status& why) = 0;
  /// COMMIT(epoch) is durable and buffer `buffer` (0, 1) holds it, verified. `epoch` names the
  /// transfer (for AcknowledgeSwap), `content` the committed epoch to serve from now on. On the
  /// leader: swap all ranks at one step boundary, then acknowledge once. `trace_id`, `lineage`: of
  /// the version; 0: not known.
  virtual void OnCommitted(Epoch epoch, Epoch content, Version version, int buffer, bool leader,
                           const std::array<uint8_t, 16>& trace_id, uint64_t lineage) = 0;
  /// A rank with one buffer: `version` can be moved only when what is served is given up. Stop
  /// serving, then Agent::MakeRoom(epoch). An epoch that ends before (by an abort) takes the wish
  /// back silently.
  virtual void OnRoomWanted(Epoch epoch, Version version) = 0;
  /// Only to one that attached with `checks_copies`: somebody verifies what is served, `content`.
  /// It is to look whether what it made of it is still so, and to answer
  /// Agent::CopyChecked(verification).
  virtual void OnCopyCheck(uint64_t /*verification*/, Epoch /*content*/) {}
  /// All ranks of the engine have swapped; the next epoch writes another buffer.
  virtual void OnInstalled(Epoch epoch, Epoch content) = 0;
  /// Fenced: stop serving, forget the stage, attach again with a new incarnation. The handle is
  /// gone.
  virtual void OnEvicted(const Status& why) = 0;
};

struct AttachRequest {
  control::GroupRole role = control::GroupRole::kTrainer;
  std::string job;  ///< empty: the agent's
  std::string group;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  Incarnation incarnation{};
  uint32_t buffers =
      0;  ///< of an engine rank's stage, at most memory::kBuffersMax; 0: the policy's
  /// Of a trainer rank; none: the agent's. An agent whose own is kOff codes nothing.
  std::optional<transfer::DeltaPolicy::Mode> delta = {};
  int64_t pid = 0;
  std::array<uint8_t, 16> trace_id{};
  /// The incarnation that the same process had before; 0: none. See control::RegisterRequest.
  Incarnation previous = {};
  /// Where the rank's stage, or the GPU pools that it asks for, are to lie; none: in host memory.
  std::optional<device::Uuid> device = {};
  /// Of an engine rank: it serves from copies of its stage, and answers OnCopyCheck.
  bool checks_copies = false;
};
struct AttachReply {
  Handle handle{};
  epoch::Member member;
  /// Not OK: the agent has no memory of the wanted device to lend and uses host memory instead, and
  /// why. Always OK when none was wanted.
  Status device = {};
  uint64_t lineage = 0;  ///< RegisterReply's, and so is `floor`
  Version floor{};
};

/// Where tensor `tensor` (index into the agreed layout) lies in imported memory.
struct TensorBinding {
  uint32_t tensor = 0;
  uint64_t region = 0;  ///< from ImportMemory or AllocateGpuMemory
  uint64_t offset = 0;  ///< bytes
};

/// Memory of the rank's device that was lent to it; the caller passes the lease (the region's fd)
/// on to the process.
struct GpuAllocation {
  uint64_t region = 0;  ///< for TensorBinding
  std::shared_ptr<memory::MemoryRegion> memory;
};

/// An engine rank's buffers; the caller passes the fds (leases, on a device) on to the process.
struct StageInfo {
  memory::ArenaMap arena;
  std::vector<std::shared_ptr<memory::MemoryRegion>> buffers;
};

struct Options {
  std::string job = "default";
  std::string name;
  Incarnation incarnation{};
  std::string host;
  std::map<std::string, std::string> addresses;  ///< of the data-plane transports
  uint64_t stage_bytes_max = 0;      ///< budget for stages and snapshots; 0 = half of the memory
  transfer::DeltaPolicy delta = {};  ///< of trainer ranks
  /// Versions that an engine rank holds beside the one that it serves, for rollbacks: 1 to
  /// memory::kBuffersMax − 1. The oldest gives way to the version that is being moved.
  uint32_t retain_versions = memory::kBuffersUsual - 1;
  memory::GpuMemoryPools gpu_pools = {};
  uint32_t participants_max = 256;
  uint64_t imported_regions_max = 4'096;
  /// While the coordinator cannot be reached: try again after this, doubled up to 16 times.
  Nanos reconnect = std::chrono::milliseconds(250);
  /// An engine rank with one buffer: how long it may take to make room, and how long it may stay
  /// empty between a failed epoch and the next one before it is fenced, so that it attaches again
  /// and is filled.
  Nanos room_deadline = std::chrono::seconds(20);
  /// An engine that has had no coordinator for so long, by this agent's clock, is fenced: what it
  /// serves is too old to be served. 0: never.
  Nanos stale_after{0};
  Notes notes = [](const Note&) {};  ///< for the log
  /// Asked with every heartbeat, so they must not block. The process lives and does not run; and
  /// what else is wrong on this host, with nobody's rank.
  std::function<bool(int64_t pid)> stopped = [](int64_t) { return false; };
  /// Asked when somebody wants a place that a process here holds: that process is known to be gone.
  std::function<bool(int64_t pid)> process_ended = [](int64_t) { return false; };
  std::function<control::Troubles()> refused = [] { return control::Troubles(); };
};

struct LocalStatus {
  Handle handle{};
  epoch::Member member;
  std::string group;
  uint32_t rank = 0;
  std::string phase;
  Epoch epoch{};
  Epoch serving{};
  Epoch behind{};  ///< newest epoch that was committed without its engine; ready: serving ≥ behind
  int64_t bytes_done = 0, bytes_total = 0;
  uint64_t stage_bytes = 0;
};

/// Every method runs on `strand` and never blocks.
class Agent : public control::AgentPort {
 public:
  static std::unique_ptr<Agent> Make(Options options, Clock& clock, Executor& strand,
                                     Executor& workers, control::CoordinatorPort& coordinator,
                                     transfer::Engine& transfers, metrics::Sink& metrics);

  /// Opens the session with the coordinator and keeps it: heartbeats, reconnects. When a session is
  /// lost, participants keep what they hold: engines serve on, a publisher goes on waiting for its
  /// release. In the next session they register again with that; one that the coordinator does not
  /// take (its place was given to another process, or the journal is another one) is evicted.
  virtual void Start() = 0;
  /// OK, or why there is no session now.
  virtual Status SessionStatus() const = 0;

  /// Registers a process. `application` must stay valid until Detach returns or OnEvicted has run.
  /// Errors: CoordinatorPort::Register's; kUnavailable / kNotReady without a session;
  /// GpuMemoryPools::Of's where GPU memory is required.
  virtual void Attach(AttachRequest request, Application* application,
                      control::Reply<AttachReply> reply) = 0;
  /// `submission.member` is filled in here. For an engine the reply waits until its stage is made
  /// (or refused: OpenStage tells). A repeat is answered alike; when another layout is agreed than
  /// before, the participant is evicted. Errors: CoordinatorPort::SubmitLayout's.
  virtual void SubmitLayout(Handle handle, control::LayoutSubmission submission,
                            control::Reply<control::LayoutReply> reply) = 0;
  /// Trainer. Errors: MemoryRegion::Import's; kResourceExhausted / kLimitExceeded.
  virtual Result<uint64_t> ImportMemory(Handle handle, memory::UniqueFd fd, uint64_t bytes) = 0;
  /// Trainer on a device: memory there that its tensors may be bound to, its own until a Bind that
  /// does not use it, or until it leaves.
  ///   kFailedPrecondition / kNotReady  attached without a device, or got none (AttachReply)
  ///   kResourceExhausted / kLimitExceeded  GpuMemoryPool::Allocate's
  virtual Result<GpuAllocation> AllocateGpuMemory(Handle handle, uint64_t bytes) = 0;
  /// Trainer: binds every tensor of the agreed layout, once per memory generation; a new call
  /// replaces the binding, lets go of regions that it does not use, and is refused while a version
  /// is held.
  ///   kInvalidArgument / kMemoryInvalid | kMemoryTooSmall | kTensorMissing  names the tensor
  ///   kFailedPrecondition / kNotReady  no layout, or a version is held
  virtual Status Bind(Handle handle, const std::vector<TensorBinding>& bindings) = 0;
  /// Engine: makes (once) and returns the stage. kResourceExhausted / kLimitExceeded names need and
  /// budget; kFailedPrecondition / kNotReady without a layout; kUnavailable / kNotReady while it is
  /// being made again after a refusal: call again.
  virtual Result<StageInfo> OpenStage(Handle handle) = 0;
  /// Trainer. `done`: accepted; OnReleased follows exactly once per accepted version, when nothing
  /// reads the bytes any more (also before OnEvicted; not after Detach, nor for a version that was
  /// revoked). A snapshot is released right after the copy, with epoch 0, and its memory is kept
  /// for the next one. A repeat of the version that is held is answered as the first call is.
  /// Errors: CoordinatorPort::Publish's; kFailedPrecondition / kNotReady when nothing is bound or
  /// another version is still held (or moves from its snapshot); kLimitExceeded when a snapshot
  /// does not fit the budget; kAborted / kAbortRequested: it was withdrawn.
  virtual void Publish(Handle handle, PublishCall call, control::Done done) = 0;
  /// Trainer. A call of Publish that is meant and comes later is refused. Answered when what the
  /// answer says holds, at once but for readers that must stop first. Whatever the coordinator
  /// believes, a version that was revoked is not prepared here: it is told as soon as it can be.
  virtual void Withdraw(Handle handle, WithdrawCall call, control::Reply<Withdrawal> reply) = 0;
  /// Leader of an engine: every rank serves `epoch` now. A repeat is OK and has no effect.
  ///   kFailedPrecondition / kStaleEpoch  not the epoch that was offered; kPermissionDenied: not
  ///   the leader
  virtual Status AcknowledgeSwap(Handle handle, Epoch epoch, double flip_seconds) = 0;
  /// In place of AcknowledgeSwap: the engine does not want the epoch, and all its ranks are back on
  /// what they served. It is fenced; what the fleet does is the coordinator's choice. As there.
  virtual Status RefuseSwap(Handle handle, Epoch epoch, const std::string& why) = 0;
  /// Engine rank with one buffer: nothing is served from it any more; OnRoomWanted(epoch) is
  /// fulfilled. A repeat is OK and has no effect.
  ///   kFailedPrecondition / kStaleEpoch  no room is wanted for this epoch (any more)
  virtual Status MakeRoom(Handle handle, Epoch epoch) = 0;
  /// Engine rank: its answer to OnCopyCheck. An answer that nobody waits for any more has no
  /// effect.
  virtual Status CopyChecked(Handle handle, uint64_t verification, Status why) = 0;
  /// The process left or its socket closed. Idempotent.
  virtual void Detach(Handle handle, Status why) = 0;

  virtual std::vector<LocalStatus> Local() const = 0;
  /// Drains, tells the coordinator, evicts the local applications (kShuttingDown). `done` when
  /// nothing of any participant runs; destroy the agent after it, before `transfers`.
  virtual void Shutdown(control::Done done) = 0;
};

}  // namespace weightwire::agent
