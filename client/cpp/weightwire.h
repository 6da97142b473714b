#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/cpp/shared_arena.h"
#include "server/base/ids.h"
#include "server/base/status.h"
#include "server/control/control.h"
#include "server/layout/types.h"

/// The C++ client: a trainer rank's Publisher, an engine rank's Subscriber. Both talk to the agent
/// of their host over its Unix socket and share memory with it; no weight byte passes through gRPC.
///
/// Nothing throws. Every call ends within its deadline. Destructors leave in good order.
namespace weightwire::client {

struct Place {
  std::string agent_socket;  ///< path; empty: DefaultAgentSocket()
  std::string job;           ///< empty: the agent's
  std::string group;         ///< "trainer", "engine-a"
  uint32_t rank = 0;
  uint32_t world_size = 1;
  Nanos call_timeout = std::chrono::seconds(30);  ///< of each call to the agent
};

/// $WEIGHTWIRE_AGENT_SOCKET, or ${XDG_RUNTIME_DIR:-/tmp}/weightwire-$UID/agent.sock.
std::string DefaultAgentSocket();

/// What a process holds: a scheme with config.json and observed tensors, or explicit boxes.
/// `member` is filled in by the client.
using Layout = control::LayoutSubmission;

enum class PublishMode { kHold, kSnapshot };

struct PublishOptions {
  PublishMode mode = PublishMode::kHold;
  bool manual_commit = false;
  Nanos deadline = std::chrono::seconds(120);  ///< for the version, all attempts included
  /// Of the version, the same in every call of this rank: a trainer that went back to an earlier
  /// step begins the one after the newest that is committed. 0: the first.
  uint64_t lineage = 0;
  /// Tensors, by index in the agreed layout, to which nothing was written since the last Publish
  /// that returned OK: the agent does not read them again to sum or copy them. One that was written
  /// all the same may be served as it was before.
  std::vector<uint32_t> unchanged = {};
};

/// What became of the bytes of a version that is not waited for any more. All of them may change.
enum class Withdrawal {
  kRevoked,   ///< nobody will serve it; it may be published again
  kRead,      ///< every one was read before: WaitReleased says whether it is served
  kReleased,  ///< as WaitReleased says, or has said
};

/// One trainer rank. Not for use from several threads at once, except that WaitReleased may run
/// while another thread publishes.
class Publisher {
 public:
  /// Registers the rank. Errors: Coordinator.Register's; kUnavailable when no agent listens.
  static Result<std::unique_ptr<Publisher>> Open(Place place);
  virtual ~Publisher() = default;

  /// Negotiates the layout, allocates shared memory for its tensors and binds it. A later call
  /// replaces both, between versions. Errors: Coordinator.SubmitLayout's, Agent.ImportMemory's.
  virtual Status Bind(Layout layout) = 0;
  /// The shared memory, in binding order; valid until the next Bind or the end.
  virtual const SharedArena& arena() const = 0;
  /// Binds memory that the caller made instead of an arena: `fd` is a memfd of `bytes` with
  /// F_SEAL_SHRINK, tensor i of the agreed layout begins at offsets[i]. The fd is not kept.
  virtual Status BindMemory(Layout layout, int fd, uint64_t bytes,
                            const std::vector<uint64_t>& offsets) = 0;

  /// Publishes what the memory holds. OK: accepted; the release follows, one for all repeats of the
  /// version. A call that gets no answer in time withdraws the version: it is OK when the version
  /// was accepted all the same; else the memory may change, unless the error's remedy says that the
  /// agent did not confirm it (then call Withdraw first). Errors: Coordinator.PublishVersion's.
  virtual Status Publish(Version version, const PublishOptions& options = {}) = 0;
  /// Blocks until the parameters may change. The epoch under which they were staged, or why the
  /// version was given up; kDeadlineExceeded after `timeout`; kNotRegistered for a version that was
  /// never accepted or was asked for already.
  virtual Result<Epoch> WaitReleased(Version version, Nanos timeout) = 0;
  /// Takes a version back. An error: the agent did not answer, and the memory must not change yet.
  virtual Result<Withdrawal> Withdraw(Version version) = 0;
};

/// A committed version, verified and complete in one of this rank's buffers.
struct Offer {
  Epoch epoch{};    ///< names the transfer; for Acknowledge
  Epoch content{};  ///< the committed epoch to serve from now on
  Version version{};
  int buffer = 0;
  bool leader = false;
  uint64_t generation = 0;  ///< which attachment of this process it belongs to
  uint64_t lineage = 0;     ///< of `version`; 0: not known
};

/// One rank of an engine. Thread-safe.
///
/// When the engine is fenced (a rank was lost, the agent or its session went away) `Serving`
/// becomes nullopt and the subscriber attaches again by itself, with pauses that grow up to 5 s;
/// once the engine is complete it is filled and a new offer arrives.
class Subscriber {
 public:
  static Result<std::unique_ptr<Subscriber>> Open(Place place);
  virtual ~Subscriber() = default;

  /// Negotiates the layout and maps this rank's stage. Errors: Coordinator.SubmitLayout's,
  /// Agent.Subscribe's.
  virtual Status Bind(Layout layout) = 0;

  /// The next committed version; nullopt after `timeout`.
  virtual std::optional<Offer> WaitOffer(Nanos timeout) = 0;
  /// Serves `offer` from now on: a change of pointers. Read-only tensors in binding order.
  ///   kAborted / kStaleIncarnation  the offer belongs to an attachment that was fenced
  virtual Result<std::vector<std::span<const std::byte>>> Flip(const Offer& offer) = 0;
  /// Leader: every rank has flipped. Errors: Agent.AcknowledgeSwap's.
  virtual Status Acknowledge(const Offer& offer, Nanos flip_time) = 0;
  /// Leader, in place of Acknowledge: the engine does not want the version, and every rank is back
  /// on what it served. The engine is fenced; the fleet goes back to the version before where the
  /// coordinator is configured so (`rollback_refused`). Errors as there.
  virtual Status Refuse(const Offer& offer, const std::string& why) = 0;
  /// What this rank serves; nullopt: it must not answer requests.
  virtual std::optional<Offer> Serving() const = 0;
  /// Why the last attachment ended; OK if none did.
  virtual Status LastFence() const = 0;
};

}  // namespace weightwire::client
