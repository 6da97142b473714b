#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/delta_figures.h"
#include "server/base/executor.h"
#include "server/memory/gpu_memory_pool.h"
#include "server/metrics/metrics.h"
#include "server/plan/plan.h"
#include "server/transfer/delta_base.h"
#include "server/transfer/kept.h"
#include "server/transfer/slot_bitmap.h"
#include "server/transport/transport.h"

/// Runs the bound plan of local ranks: packs, sums, announces, fetches, unpacks, verifies.
///
/// For each stream of a plan the source cuts the packed bytes into slots (plan/segments.h):
///
///   target → OPEN(epoch, plan, stream)              "I am ready to read"
///   source → BINDING(key) and READY(slot k, key, bytes), in order, at most `window` ahead
///   target   Get (slots) or a fused copy from the mapped source; sums what was *written*
///   target → CREDIT(k)       source reuses slot k when every planned reader has credited it
///   target → CLOSE           all done, or the target gave up
///   source → FAIL(reason)    the source cannot go on
///   source → WAITING(k)      a relay: slot k has not come to it yet
///
/// A slot is a gather list: runs that are long and need no cast are sent straight from the source's
/// memory, the rest is packed into a slot of the pool; the target scatters likewise. Where the
/// transport can map, no payload is packed at all: the slot holds only the sums and the target
/// copies from the source's tensors. Where it reaches GPU memory, slots, runs and scratch lie on
/// the GPU of the tensors and only the sums in host memory (gpu_direct.h). A segment whose sum
/// differs is read again at most twice. Streams of one (plan, stream) with several readers are
/// packed and summed once.
///
/// A segment that the target holds already (kept.h), from an attempt that was cut short or because
/// the version did not change it, is not read: the slot's sums come first. Of a slot that has
/// changed throughout they come last, made of what is about to be sent (leaving_sums.h).
///
/// What a rank gathers is a tensor of its binding to all of this. When its streams are there, and
/// before the job is done, the rank makes codes and scales of it (target_run.cc).
///
/// Where a source keeps what it sent last (delta_base.h), it announces with a slot what changed
/// there since earlier versions: DELTA, then READY. A reader that knows sums of what it holds reads
/// that instead, makes the segments of what it serves and of the codes, and sums what it made; a
/// segment for which no code fits, or which comes out with another sum, is read as it is.
///
/// A rank may pass on what it receives (plan/relayed.h): its source job announces a slot when its
/// target job has verified it, with sums of its own. As long as that one is alive and has nothing
/// that could be announced, the source says so, and its readers' time does not run: in a chain of
/// engines only the one fails whose parent has bytes and does not send them, or has gone silent.
///
/// The streams of a rank share its link by bytes and so end together: slots that may be announced
/// at the source, and Gets under way at the target, are limited for the rank as a whole and go to
/// its streams in proportion to their bytes (fair_semaphore.h); no stream may hold more than its
/// part of them (flow_control.h). Memory is bounded by the two pools of the process, however many
/// streams there are.
namespace weightwire::transfer {

struct Tuning {
  int64_t segment_bytes_max = 1 << 20;
  int64_t slot_bytes = 8 << 20;
  uint32_t slots_in_pool = 16;  ///< per process, shared by all streams
  /// Slots announced and not yet credited, of the streams of one rank together. As many bytes as
  /// `gets_in_flight` chunks: the narrower side's shares then rule, and not the mean of both.
  uint32_t window = 8;
  uint32_t mapped_window = 64;    ///< the same where nothing is packed
  int64_t chunk_bytes = 4 << 20;  ///< of one Get; whole segments
  uint32_t gets_in_flight = 16;   ///< of the streams of one rank together
  /// At most these of peers on this host whose memory is not mapped. What is under way there waits
  /// in this machine's caches between the kernel's copies and the sums, or no longer does where it
  /// is more (docs/history/performance.md); there is no network to fill.
  int64_t near_chunk_bytes = 2 << 20;
  uint32_t near_gets_in_flight = 4;
  int64_t direct_run_bytes_min = 4096;  ///< shorter runs are packed
  /// The same where what is read is brought on by us, out of a buffer in the cache
  /// (transport::Endpoint::GetThrough), and not by the kernel or a NIC, for which every run counts.
  int64_t through_run_bytes_min = 512;
  /// Bytes a second that this agent sends, and as many that it reads, over transports that do not
  /// map memory; and the same with any one peer agent. 0: no limit; else at least `slot_bytes`, so
  /// that no stream waits for its turn so long that it seems to be stuck.
  uint64_t rate_limit = 0;
  uint64_t peer_rate_limit = 0;
  int rereads_max = 2;  ///< of one segment
  Nanos connect_timeout = std::chrono::seconds(5);
  Nanos get_timeout = std::chrono::seconds(30);
  /// A stream without any progress for this long fails with kDeadlineExceeded. Time in which the
  /// sender waits for its own sender does not count.
  Nanos progress_timeout = std::chrono::seconds(30);
  /// A job that is drained closes the sessions of peers that have not let go after this long.
  Nanos drain_grace = std::chrono::seconds(5);
};

/// Where a peer agent can be reached.
struct Peer {
  AgentId agent{};
  Incarnation incarnation{};
  std::string host;                              ///< host identity: equal on the same host
  std::map<std::string, std::string> addresses;  ///< transport name → address
  Ticket ticket{};
  friend bool operator==(const Peer&, const Peer&) = default;
};

/// Memory of a rank's tensors, by index into RankLayout::tensors; behind them what the rank gathers
/// in (plan::GatherBuffer), where its plan has that.
using Binding = std::vector<memory::RegionSpan>;

/// The sum over one stream's segment sums (XXH3 64 of them, in order): what source and target
/// report over the control plane, where the coordinator compares them.
struct StreamDigest {
  PlanId plan;
  uint32_t stream = 0;
  uint64_t digest = 0;
  friend bool operator==(const StreamDigest&, const StreamDigest&) = default;
};

/// What a part of a job took, for people: "pack" of a source, "read" (one for each sender and
/// transport), "verify" and "quantize" (what was gathered) of a target. Where memory is mapped,
/// reading and verifying are one pass.
struct WorkSpan {
  const char* what = "";  ///< a literal
  Nanos begin{}, end{};
  int64_t bytes = 0;
  ParticipantId source{};  ///< read: from whom
  std::string transport;   ///< read; as in TargetReport::bytes_by_transport
  friend bool operator==(const WorkSpan&, const WorkSpan&) = default;
};

/// What is known of a source's bytes (pack.h: HeadsOf), by plan.
using Heads = std::map<PlanId, Kept>;

/// Whom the coordinator gave the tickets of a job. A stream is opened by nobody else: not over a
/// session that another job's ticket opened, nor in the place of another rank.
struct Readers {
  std::set<Incarnation> callers;  ///< agents
  struct Rank {
    Incarnation caller{};
    uint32_t rank = 0;  ///< of the streams' target ranks
  };
  std::map<ParticipantId, Rank> ranks;  ///< empty: not known (an older coordinator)
};

struct SourceAssignment {
  std::shared_ptr<const plan::RankSlice> slice;  ///< side kSource
  uint32_t readers = 1;                          ///< engines that will open each stream
};
struct SourceJob {
  Epoch epoch{};
  ParticipantId participant{};
  std::string name;                               ///< "trainer/3", for messages
  std::vector<SourceAssignment> assignments;      ///< one for each distinct plan
  std::optional<Readers> readers = std::nullopt;  ///< none: whoever was let in
  Binding binding;
  /// Of what was packed last, brought up to date as slots are packed: tells what has certainly
  /// changed since. Null where that is of no use.
  std::shared_ptr<Heads> heads;
  /// By tensor of `binding`, from 1 on: another number where its bytes may be other ones than in
  /// the job before. Empty: not known.
  std::vector<uint64_t> generations = {};
  /// By plan; brought up to date as slots are credited. What it has of a tensor's generation is not
  /// read again to be summed. Null exactly where there are no generations.
  std::shared_ptr<std::map<PlanId, ServedSums>> served = nullptr;
  /// A relay: a slot is read only once it is there. Null: all bytes are there.
  std::shared_ptr<SlotBitmap> received;
  /// What was sent last, to send only what changed since. Null: everything is sent.
  std::shared_ptr<DeltaBases> delta = nullptr;
  /// A reader that keeps a slot so long after another one has given it back, while there is more to
  /// read, is told to fail (kDeadlineExceeded / kLimitExceeded), and the others read on. The
  /// job then ends by Drain only, for it is not the source that decides about the version. 0:
  /// never.
  Nanos stall_limit{0};
  /// Whether the others go on without a reader that is lost or gives up, Exclude says, or Drain
  /// ends the job. Where neither comes within `progress_timeout` after all others have everything,
  /// the job fails as it does without this.
  bool drops_readers = false;
};
struct SourceReport {
  std::vector<StreamDigest> digests;  ///< not of streams all of whose readers were excluded
  int64_t bytes_packed = 0;
  std::vector<WorkSpan> spans = {};
};

struct TargetJob {
  Epoch epoch{};
  ParticipantId participant{};
  std::string name;                              ///< "engine-a/1"
  std::shared_ptr<const plan::RankSlice> slice;  ///< side kTarget
  std::map<uint32_t, Peer> sources;              ///< by source rank of the plan
  std::map<uint32_t, ParticipantId> source_participants;
  Binding binding;  ///< writable
  /// Of `binding`; brought up to date as segments are written.
  std::shared_ptr<Kept> kept = std::make_shared<Kept>();
  /// What the engine serves meanwhile; null and empty where it serves nothing else.
  std::shared_ptr<const Kept> served_kept;
  Binding served;
  /// Told of every slot that was verified; null where nobody relays it.
  std::shared_ptr<SlotBitmap> received;
};
struct TargetReport {
  std::vector<StreamDigest> digests;
  int64_t bytes = 0;  ///< verified: all of the plan's
  /// That were read; "ucx-gpu": straight between ucx and GPU memory.
  std::map<std::string, int64_t> bytes_by_transport;
  uint32_t rereads = 0;
  int64_t bytes_kept = 0;  ///< of `bytes`: not read, because they were here already
  DeltaFigures delta = {};
  std::vector<WorkSpan> spans = {};
};

struct Options {
  Tuning tuning;
  std::string host;    ///< our host identity
  Incarnation self{};  ///< of this agent
  /// Transports to try in this order when several reach a peer. A peer on another host is never
  /// tried over "shm" or "cuda_ipc".
  std::vector<std::string> preference = {"shm", "tcp"};
  /// A transport over which a peer could not be reached or was lost is not chosen for it again for
  /// this long where another one reaches it. 0: it always is.
  Nanos avoid_after_failure = std::chrono::minutes(1);
  /// Sessions are opened only with proof of the ticket (transport/proof.h). Otherwise a peer of the
  /// version before that, whose caller shows the ticket, is spoken to as it does.
  bool proof_required = false;
  /// GPU memory for slots and scratch (gpu_direct.h), taken where a transport reaches any.
  memory::GpuMemoryPools gpu_pools = {};
  /// Payload may not pass host memory: a job whose tensors lie there, or that has a peer whose
  /// transport does not reach GPU memory, fails with kFailedPrecondition / kTransportFailed.
  bool gpu_direct_required = false;
};

/// All transfers of one agent. Destroy the transports after Shutdown and before the engine. Every
/// method and callback runs on `strand`; `workers` runs packing, copying and summing; transports
/// call the Handler part on their own threads and it posts.
///
/// Several jobs may run at once (an epoch and fills); a job is named by (epoch, participant).
class Engine {
 public:
  using SourceDone = std::function<void(Result<SourceReport>)>;
  using TargetDone = std::function<void(Result<TargetReport>)>;
  /// Transports are started here and must outlive the engine's Shutdown.
  static Result<std::unique_ptr<Engine>> Make(Options options, Clock& clock, Executor& strand,
                                              Executor& workers,
                                              std::vector<transport::Transport*> transports,
                                              metrics::Sink& metrics);
  virtual ~Engine() = default;

  /// Sessions are accepted only with a ticket that was admitted; each AdmitTicket is one use, and
  /// the ticket holds until each was withdrawn.
  virtual void AdmitTicket(const Ticket& ticket, Incarnation caller) = 0;
  virtual void WithdrawTicket(const Ticket& ticket, Incarnation caller) = 0;

  /// Serves the streams of `job` until drained. `done` runs once: with the sums when every slot of
  /// every stream has been summed and read by all its readers, or with the failure. A reader that
  /// closes early or vanishes fails only the streams it read, and the job at the end.
  virtual void StartSource(SourceJob job, SourceDone done) = 0;

  /// Of a source or relay: nothing is waited for from these readers of a plan's streams any more
  /// (by target rank of the plan: each reads the streams to its own rank), whether they have
  /// opened, are gone or never come; they are told, and no OPEN of theirs is accepted. The others
  /// read on, and a stream that had no others is over. Repeating it changes nothing, nor do unknown
  /// jobs and plans.
  virtual void Exclude(Epoch epoch, ParticipantId participant, const PlanId& plan,
                       const std::vector<ParticipantId>& readers) = 0;

  /// Fills `job.binding`. `done` runs once: OK means every planned byte was written and every
  /// segment's destination bytes agree with the source's sum. Failures name stream, source, tensor.
  ///   kDataLoss / kDigestMismatch, kUnavailable / kTransportFailed, kDeadlineExceeded, kAborted
  virtual void StartTarget(TargetJob job, TargetDone done) = 0;

  /// Stops a job of either side (its `done` runs with kAborted unless it has run) and calls
  /// `drained` when no thread, peer or transport touches its memory any more: posted Gets have
  /// ended; readers that mapped the memory have closed or are gone. Unknown jobs are drained.
  virtual void Drain(Epoch epoch, ParticipantId participant, std::function<void()> drained) = 0;

  /// Payload bytes done and planned, for progress; zeros for unknown jobs.
  struct Progress {
    int64_t bytes_done = 0;
    int64_t bytes_total = 0;
  };
  virtual Progress ProgressOf(Epoch epoch, ParticipantId participant) const = 0;

  /// Drains everything and closes every session; `done` when nothing is in flight.
  virtual void Shutdown(std::function<void()> done) = 0;
};

}  // namespace weightwire::transfer
