#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/transfer/notify.h"
#include "server/transfer/transfer.h"
#include "server/transport/fake/fake_transport.h"
#include "tests/support/sim_executor.h"
#include "tests/unit/transfer/random_plan.h"

namespace weightwire::transfer::testing {

/// Keeps every counter, by name and labels: "transfer_bytes_total{direction=in,transport=fake}".
class CountingSink final : public metrics::Sink {
 public:
  void DeclareCounter(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareGauge(std::string_view, std::string_view, std::vector<metrics::Labels>) override {}
  void DeclareHistogram(std::string_view, std::string_view, std::vector<double>,
                        std::vector<metrics::Labels>) override {}
  void Add(std::string_view counter, double amount, const metrics::Labels& labels) override;
  void Set(std::string_view, double, const metrics::Labels&) override {}
  void Observe(std::string_view histogram, double, const metrics::Labels& labels) override;
  double Count(const std::string& name) const;

 private:
  std::map<std::string, double> counts_;
};

/// Small slots, so that little tensors take many of them.
Tuning SmallTuning();

/// What carries no GPU memory beside what does.
inline constexpr char kPlain[] = "plain";

/// Ranks and transports of a side.
struct Placement {
  std::optional<size_t> gpu;  ///< index of the GPU where all its ranks lie; none: in host memory
  bool gets_device_memory = true;  ///< its transports "fake" do
  uint64_t slab_bytes = 0;         ///< of each agent, on that GPU or the first one; 0: enough
};

struct FleetOptions {
  uint64_t seed = 1;
  PlanShape shape;
  /// Streams of these sizes (MakeSizedPlan) in place of random ones, where it is not empty; `shape`
  /// must name as many ranks.
  std::vector<std::vector<int64_t>> stream_bytes;
  uint32_t engines = 1;        ///< readers of every stream
  bool chain = false;          ///< each engine reads from the one before it
  uint32_t source_agents = 2;  ///< source ranks are spread over them
  uint32_t target_agents = 2;
  bool map = false;
  bool odd_targets_map = true;  ///< false: of the target agents only "t0", "t2", … can map
  Tuning tuning = SmallTuning();
  transport::FakeLink link;  ///< everywhere
  uint32_t notifies_queued_max = 1024;
  bool proof_required = false;
  /// Ranks and transports on fake GPUs (tests/support/fake_cuda), where one is set.
  std::optional<Placement> sources_on;
  std::optional<Placement> targets_on;
  /// All agents have a second transport, kPlain, which carries host memory only; odd target agents
  /// read over that.
  bool odd_targets_read_plain = false;
  bool late_nic = false;             ///< what a Get writes to a GPU is seen after a flush only …
  bool flush_device_writes = false;  ///< … and the transport says so
  bool gpu_direct_required = false;
  bool targets_require_gpu_direct = true;  ///< where it is required
};

/// A whole fleet in one thread under virtual time: agents "s0"… hold sources, "t0"… targets.
class Fleet {
 public:
  explicit Fleet(const FleetOptions& options);
  ~Fleet();

  struct Source {
    SourceJob job;
    size_t agent = 0;
    int done_calls = 0;
    std::optional<Result<SourceReport>> result;
    bool drained = false;
  };
  struct Target {
    TargetJob job;
    size_t agent = 0;
    uint32_t rank = 0;
    RankMemory memory;
    std::vector<std::byte> before;
    std::vector<std::byte> expected;
    int done_calls = 0;
    std::optional<Result<TargetReport>> result;
    bool drained = false;
    std::optional<SourceJob> relay;  ///< what it passes on
    int relay_done_calls = 0;
  };
  struct Agent {
    std::string address;
    Incarnation incarnation;
    std::unique_ptr<Engine> engine;
    std::unique_ptr<transport::Transport> transport;
    std::unique_ptr<transport::Transport> plain;
    memory::GpuMemoryPools gpu_pools;
  };

  /// The trainer's ranks as a target of `target_agent` reads from them.
  std::map<uint32_t, Peer> Direct(size_t target_agent) const;

  void StartSource(size_t i);
  void StartTarget(size_t i);
  void StartAll();
  void DrainSource(size_t i);
  void DrainTarget(size_t i);
  /// Runs until every started job has its result.
  void RunToResults();
  /// Drains everything, shuts every engine down, and checks that all of it ends.
  void End();

  Engine& EngineOf(const Source& source) { return *source_agents[source.agent].engine; }
  Engine& EngineOf(const Target& target) { return *target_agents[target.agent].engine; }

  testing::Rng rng;
  weightwire::testing::SimExecutor sim;
  transport::FakeNetwork network;
  CountingSink metrics;
  RandomPlan plan;
  std::vector<Agent> source_agents;
  std::vector<Agent> target_agents;
  std::vector<RankMemory> source_memory;
  std::deque<Source> sources;
  std::deque<Target> targets;
  bool odd_targets_read_plain;

 private:
  Agent MakeAgent(const FleetOptions& options, const std::string& address, uint64_t incarnation,
                  bool map, const std::optional<Placement>& placement, uint64_t slab_bytes);
  /// Of a rank of `agent`, once its bytes are made.
  static void Place(RankMemory& memory, const Agent& agent,
                    const std::optional<Placement>& placement);
  /// Target `child` reads from `parent`, which holds the same rank of the engine before.
  void Relay(Target& parent, Target& child);
  Peer PeerOf(const Agent& agent, size_t reader) const;
  bool ended_ = false;
};

/// Two buffers for each target, of which each version is written to the one that the version before
/// does not live in.
struct Versions {
  explicit Versions(const FleetOptions& options);
  /// Sources know from now on which of their tensors changed.
  void TellGenerations();
  /// Sources keep from now on what they sent.
  void Code(DeltaPolicy policy, DeltaBases::Admit admit);
  /// Makes one more version ready; targets expect the sources' bytes of `then`.
  void Prepare(const std::vector<RankMemory>& then);
  /// Runs it.
  void Next(const std::vector<RankMemory>& then);
  /// Of the first byte of a copy, what may change in any dtype.
  void Touch(const plan::Stream& stream, const plan::CopyOp& op);

  Fleet fleet;
  std::vector<RankMemory> spare;
  std::vector<std::shared_ptr<Kept>> kept;
  uint32_t engines;
  uint64_t version = 0;
};

/// Reads by hand what `agent` serves of `job`, as a build with these features of a session or an
/// older one. Stream 0 of slots of SmallTuning().
class HandReader final : public transport::Handler {
 public:
  HandReader(Fleet& fleet, const Fleet::Agent& agent, const SourceJob& job, Incarnation self,
             uint64_t features);
  ~HandReader() override;
  Result<Ticket> OnHello(const transport::CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<transport::Endpoint>) override {}
  void OnNotify(const std::shared_ptr<transport::Endpoint>&,
                std::span<const std::byte> message) override;
  void OnClosed(const std::shared_ptr<transport::Endpoint>&, const Status&) override {}
  void Open(ParticipantId as);
  /// It has read the slot.
  void Credit(ParticipantId as, uint32_t slot);

  std::vector<Notify> heard;

 private:
  StreamKey KeyOf(ParticipantId as) const;
  void Send(const Notify& notify);

  Fleet& fleet_;
  const SourceJob& job_;
  std::unique_ptr<transport::Transport> transport_;
  std::shared_ptr<transport::Endpoint> endpoint_;
};

/// By chance: ranks, agents, sizes, limits, topology, delays.
FleetOptions RandomFleet(uint64_t seed);
/// Likewise, for attempts that are cut short.
FleetOptions LosingFleet(uint64_t seed);
/// Ends what ran and makes the next attempt ready, as the agents do after an abort.
void NextAttempt(Fleet& fleet, Epoch epoch);
/// Three attempts, in each of which one reader's sessions break at a moment by chance; starts the
/// next one. Returns the losses.
uint64_t StartAfterLosses(Fleet& fleet, const FleetOptions& options, std::mt19937_64& rng);
/// Runs to the results: every target has its bytes …
void ExpectBytes(Fleet& fleet);
/// … all of them moved, with equal digests on both sides.
void ExpectArrived(Fleet& fleet, uint32_t engines);
int64_t BytesKept(const Fleet& fleet);
int64_t BytesMoved(const Fleet& fleet);

}  // namespace weightwire::transfer::testing
