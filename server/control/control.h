#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/base/clock.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/epoch/messages.h"
#include "server/layout/scheme.h"
#include "server/layout/trace.h"
#include "server/layout/types.h"
#include "server/plan/plan.h"

/// What agents ask of the coordinator, and the ports through which either reaches the other: over
/// gRPC (rpc/), or directly inside one process and in the simulator.
namespace weightwire::control {

inline constexpr uint16_t kProtocolMin = 1;
inline constexpr uint16_t kProtocolMax = 1;

/// AgentHello::features: the agent understands StaleCommand, HashCommand.
inline constexpr uint64_t kFeatureStale = 1;
inline constexpr uint64_t kFeatureContentHash = 2;
/// It makes fp8 codes and scales on the way.
inline constexpr uint64_t kFeatureQuantize = 4;
/// As a target it gathers floats and quantizes them itself.
inline constexpr uint64_t kFeatureGather = 8;
/// It makes scales by other rules than amax / 448 in fp32 (layout::ScaleRule).
inline constexpr uint64_t kFeatureScaleRules = 1024;
/// It makes codes of four bits, and their scales.
inline constexpr uint64_t kFeatureFourBits = 2048;
/// It makes codes by layout::ScaleRule::kOwnQuotient.
inline constexpr uint64_t kFeatureOwnQuotient = 4096;
/// It understands ExcludeCommand: as a source or a relay it can drop a reader while bytes move.
inline constexpr uint64_t kFeatureExclude = 16;
/// Its session remembers addresses that it was told (wire/addresses.h).
inline constexpr uint64_t kFeatureAddressesOnce = 64;
/// Asked for with each slice: names of tensors may leave off what they share with the one before.
inline constexpr uint64_t kFeatureNamesShared = 128;

/// AgentWelcome::features: reports come on the session (wire/reports.h).
inline constexpr uint64_t kFeatureReportsOnSession = 1;

enum class GroupRole : int { kTrainer = 1, kEngine = 2 };

/// An agent opens its session; one per process lifetime.
struct AgentHello {
  std::string job;
  std::string name;  ///< for people: pod or host name
  Incarnation incarnation{};
  std::string host;  ///< host identity (boot id + namespaces), equal on the same host
  std::map<std::string, std::string> addresses;  ///< data plane: transport → address
  uint16_t protocol_min = kProtocolMin;
  uint16_t protocol_max = kProtocolMax;
  uint64_t features = 0;
  friend bool operator==(const AgentHello&, const AgentHello&) = default;
};
struct AgentWelcome {
  AgentId agent{};
  uint16_t protocol = 0;
  Nanos heartbeat{};  ///< send one at least this often
  Nanos lease{};      ///< without one for this long the places of its participants are free
  /// Whose decisions the coordinator goes on from: equal for all coordinators of one journal, one
  /// after another. 0: of nobody who says so; nothing survives its loss.
  JournalId history{};
  uint64_t features = 0;  ///< of the way to the coordinator
  friend bool operator==(const AgentWelcome&, const AgentWelcome&) = default;
};

/// What a rank brings along that was registered with a coordinator before, on the same history, and
/// lost it. All of it is the agent's own knowledge: bytes that it verified in this life of the
/// rank.
struct RejoinState {
  epoch::Content serving;  ///< engine: what it serves
  epoch::Contents holds;   ///< engine: what its other buffers hold whole
  /// Engine: the epoch that is verified in another buffer, its end not known here; 0: none.
  Epoch staged{};
  Epoch content{};     ///< of `staged`: what would be served
  bool told = false;   ///< COMMIT came: the engine may be swapping to it
  Version released{};  ///< trainer: highest version that will not be published again
  Version version{};   ///< of `content`; 0: an agent that does not say
  friend bool operator==(const RejoinState&, const RejoinState&) = default;
};

/// What an agent knows of a process of its host that cannot do its part, as the system says. For
/// people.
struct Trouble {
  epoch::Member member;  ///< of the agent's; none: of nobody who has attached
  std::string what;      ///< "its process 4711 is stopped"
  std::string remedy;
  friend bool operator==(const Trouble&, const Trouble&) = default;
};
using Troubles = std::vector<Trouble>;

/// How far an engine's rank is with what it receives. For people.
struct Receiving {
  epoch::Member member;
  Epoch epoch{};
  int64_t bytes_done = 0;  ///< what was kept is among them
  friend bool operator==(const Receiving&, const Receiving&) = default;
};
/// What an agent says of its ranks with every heartbeat: all that there is now.
struct Beat {
  Troubles troubles;
  std::vector<Receiving> receiving;
};

/// A process takes its place: rank `rank` of `group` ("trainer", "engine-a").
struct RegisterRequest {
  AgentId agent{};
  std::string job;
  GroupRole role = GroupRole::kTrainer;
  std::string group;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  Incarnation incarnation{};
  int64_t pid = 0;  ///< for people
  std::array<uint8_t, 16> trace_id{};
  RejoinState claim;  ///< nothing for a new process
  /// The incarnation that the same process had before, where it had one: it gives that one's place
  /// up. 0: none.
  Incarnation previous{};
  friend bool operator==(const RegisterRequest&, const RegisterRequest&) = default;
};
struct RegisterReply {
  epoch::Member member;
  /// The newest lineage that was committed; 0: a coordinator that knows none.
  uint64_t lineage = 0;
  /// Of that lineage: versions up to this one are not accepted any more. 0: none yet.
  Version floor{};
  friend bool operator==(const RegisterReply&, const RegisterReply&) = default;
};

struct LayoutOfModel;
/// A scheme with config.json (pieces are derived and compared with `observed`); or what the
/// engine's own loader did (`trace`), which wins over the scheme and is compared with it when there
/// is a `spec`; or explicit boxes (`canonical` and `layout` set, nothing else). With a trace,
/// `checkpoint` may say what tensors the loader was fed, for a model that no family describes.
/// Of a rank that has several models, and of an engine that holds one of several (`models` set,
/// nothing else): each as it would be submitted alone.
struct LayoutSubmission {
  epoch::Member member;
  std::string config_json;
  std::string spec;  ///< "megatron:tp2,pp2"
  std::vector<layout::ObservedTensor> observed;
  std::vector<layout::TraceRow> trace;
  std::vector<layout::ObservedTensor> checkpoint;
  std::optional<layout::CanonicalSpace> canonical;
  std::optional<layout::RankLayout> layout;
  std::vector<LayoutOfModel> models;  ///< layout/models.h
};
/// `rank` of the `world_size` ranks that share this model, which need not be all of the group;
/// world_size 0: this rank has nothing of it, and says only what tensors it has.
struct LayoutOfModel {
  std::string model;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  LayoutSubmission layout;
};
struct LayoutReply {
  std::shared_ptr<const layout::RankLayout> agreed;  ///< never null
  layout::Fingerprint canonical;
  std::vector<std::string> notes = {};  ///< where a trace and the scheme disagree, for people
};

struct PublishRequest {
  epoch::Member member;
  Version version{};
  bool manual_commit = false;  ///< COMMIT waits for Commit(); all ranks must agree
  Nanos deadline{};            ///< for the whole version, all attempts included
  std::array<uint8_t, 16> trace_id{};
  /// Rises with every version that the rank publishes anew; a repeated call keeps it. 0: not
  /// counted.
  uint64_t number = 0;
  /// Of `version`: the newest that is committed, or the next one, which then begins. 0: the first.
  uint64_t lineage = 0;
  friend bool operator==(const PublishRequest&, const PublishRequest&) = default;
};

/// The rank serves no byte of what it published as `version` under `number` or an earlier one.
struct WithdrawRequest {
  epoch::Member member;
  Version version{};
  uint64_t number = 0;
  friend bool operator==(const WithdrawRequest&, const WithdrawRequest&) = default;
};

template <typename T>
using Reply = std::function<void(Result<T>)>;
using Done = std::function<void(Status)>;

/// What the coordinator calls in an agent. Calls come in order; they must not block.
class AgentPort {
 public:
  virtual ~AgentPort() = default;
  virtual void OnCommand(epoch::Command command) = 0;
  /// The session ended (the connection broke, lease expired, replaced by a newer one, shutdown, the
  /// coordinator is gone). The agent may open a new one and register its participants again, with
  /// what they hold; one whose place was given to another process meanwhile is refused.
  virtual void OnSessionLost(Status why) = 0;
};

/// What an agent calls in the coordinator. Asynchronous; every reply comes exactly once, on the
/// caller's strand, within the implementation's deadline. All calls are idempotent: repeating one
/// with equal content gives the same answer.
class CoordinatorPort {
 public:
  virtual ~CoordinatorPort() = default;
  /// `port` must stay valid until OnSessionLost or CloseSession.
  ///   kProtocolVersion, kInvalidRequest, kShuttingDown
  virtual void OpenSession(AgentHello hello, AgentPort* port, Reply<AgentWelcome> reply) = 0;
  /// Goodbye: the agent's ranks are gone. (A connection that only breaks takes nothing.)
  virtual void CloseSession(AgentId agent) = 0;
  virtual void Heartbeat(AgentId agent, Beat beat) = 0;
  ///   kAlreadyExists / kDuplicateRank  another incarnation holds the rank; one that is cut off
  ///                                    holds it until its lease ends, for which this call waits
  ///   kUnavailable / kNotRegistered    the session is over
  ///   kInvalidArgument / kInvalidRequest  rank ≥ world_size, world sizes disagree, empty or long
  ///                                       group, role differs from the group's
  ///   kFailedPrecondition / kStaleIncarnation  this incarnation was fenced; choose a new one
  ///   kResourceExhausted / kLimitExceeded
  virtual void Register(RegisterRequest request, Reply<RegisterReply> reply) = 0;
  ///   everything layout::LayoutFromScheme, Reconcile and ValidateRank may answer, with the rank
  ///   kFailedPrecondition / kStaleIncarnation | kNotRegistered
  ///   kFailedPrecondition / kShapeMismatch  canonical spaces of the ranks of a group differ
  virtual void SubmitLayout(LayoutSubmission submission, Reply<LayoutReply> reply) = 0;
  /// OK: the version is accepted for this rank; Prepare follows when all ranks have published.
  ///   kFailedPrecondition / kStaleVersion      not newer than the last one of its lineage
  ///   kFailedPrecondition / kStaleIncarnation  of a lineage that has ended: the trainer is fenced
  ///   kInvalidArgument / kInvalidRequest       of a lineage after the next one
  ///   kFailedPrecondition / kMissingRank | kStaleIncarnation
  ///   kResourceExhausted / kLimitExceeded      too many versions wait already
  virtual void Publish(PublishRequest request, Done done) = 0;
  /// What is prepared or moves of the version is aborted; then it waits for the rank to publish it
  /// again. A Publish of this or an earlier number is refused from now on. OK also when nothing of
  /// it is known.
  ///   kFailedPrecondition / kStaleEpoch         too late: it is staged
  ///   kFailedPrecondition / kStaleIncarnation | kNotRegistered
  virtual void Withdraw(WithdrawRequest request, Done done) = 0;
  ///   kNotFound / kNotRegistered  the plan is not known (any more)
  virtual void FetchSlice(PlanId plan, plan::Side side, uint32_t rank,
                          Reply<std::shared_ptr<const plan::RankSlice>> reply) = 0;
  virtual void Report(AgentId agent, epoch::Report report) = 0;
};

}  // namespace weightwire::control
