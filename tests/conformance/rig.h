#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "server/metrics/metrics.h"
#include "server/transport/fake/fake_transport.h"
#include "server/transport/proof.h"
#include "server/transport/tcp/tcp_transport.h"
#include "server/transport/transport.h"
#include "tests/support/sim_executor.h"

/// Runs one test on any transport. Real transports call back on their threads: tests wait on a
/// condition with a deadline that only a failure meets. The fake one runs in virtual time, inside
/// the wait.
namespace weightwire::conformance {

using namespace std::chrono_literals;  // NOLINT: a test header
using transport::Endpoint;
using transport::GatherList;
using transport::Hello;
using transport::MutableSpan;
using transport::RegionKey;
using transport::Transport;

struct Kind {
  std::string name;     ///< of the test instance
  std::string backend;  ///< "fake", "shm", "cuda_ipc", "tcp", "ucx" or "nccl"
  int connections = 1;
  std::string tls = {};                                         ///< of ucx
  transport::Integrity integrity = transport::Integrity::kCrc;  ///< of tcp
  size_t gpus = 0;   ///< of cuda_ipc: on so many GPUs lies what is mapped; 0: in host memory
  bool gpu = false;  ///< of fake and nccl: all that is exported and read into lies on a fake GPU
};
void PrintTo(const Kind& kind, std::ostream* out);
std::vector<Kind> AllKinds();
std::vector<Kind> RealKinds();
/// libucp 1.13 is killed by peers that die over tcp (docs/gotchas.md); 1.22 is not.
bool UcxSurvivesTcp();
/// None where the plug-in is not built; over tcp alone only where libucp survives it.
std::vector<Kind> UcxKinds();

constexpr Nanos kLong = 60s;

/// Limits that some tests make small.
struct Limits {
  uint64_t chunk_bytes_max = 64 << 20;
  uint32_t gets_in_flight_max = 64;
  uint32_t notifies_queued_max = 1024;
  Nanos handshake_timeout = 10s;
  uint32_t inbound_handshakes_max = 64;
  Nanos handshake_grace = 250ms;  ///< of tcp
  uint32_t inbound_sessions_max = 1024;
  metrics::Sink* metrics = &metrics::Null();
};

/// The outcome of one operation.
struct Call {
  int completions = 0;
  Status status;
  transport::MappedList mapped;
  std::shared_ptr<Endpoint> endpoint;  ///< of a Connect
  std::thread::id thread;
  bool inside_post = false;  ///< completed before the posting call returned
};

class Rig;

/// What every side admits.
Ticket TheTicket();

/// Keeps what the transport reports; refuses all tickets but one.
class Recorder final : public transport::Handler {
 public:
  explicit Recorder(Rig& rig) : rig_(rig) {}
  Result<Ticket> OnHello(const transport::CallerHello& said) override;
  void OnAccepted(std::shared_ptr<Endpoint> endpoint) override;
  void OnNotify(const std::shared_ptr<Endpoint>& endpoint,
                std::span<const std::byte> message) override;
  void OnClosed(const std::shared_ptr<Endpoint>& endpoint, const Status& why) override;

  // All guarded by the rig's mutex.
  std::vector<std::shared_ptr<Endpoint>> accepted;
  std::vector<transport::CallerHello> hellos;
  std::vector<std::string> notifies;
  std::map<uint64_t, Status> closed;  ///< by endpoint id
  std::map<uint64_t, int> closed_calls;
  std::set<std::thread::id> threads;
  /// Runs at the end of OnNotify, outside the mutex.
  std::function<void(const std::shared_ptr<Endpoint>&)> after_notify;

 private:
  Rig& rig_;
};

/// One agent: a transport, its handler, its incarnation.
struct Side {
  Side(Rig& rig, Incarnation the_self) : recorder(rig), self(the_self) {}
  Recorder recorder;
  Incarnation self;
  std::unique_ptr<Transport> transport;
};

class Rig {
 public:
  explicit Rig(Kind kind);
  ~Rig();

  /// A started transport.
  std::unique_ptr<Side> MakeSide(Limits limits = {});
  /// Endpoint of `from` towards `to`; fails the test when there is none.
  std::shared_ptr<Endpoint> Open(Side& from, Side& to);
  std::shared_ptr<Call> Connect(Side& from, const std::string& address, const Hello& hello,
                                Nanos timeout = kLong);
  Hello HelloFor(const Side& from, Incarnation callee) const;

  std::shared_ptr<Call> Get(const std::shared_ptr<Endpoint>& endpoint, RegionKey key,
                            uint64_t offset, std::vector<MutableSpan> into, Nanos timeout = kLong,
                            std::shared_ptr<void> hold = nullptr);
  std::shared_ptr<Call> Map(const std::shared_ptr<Endpoint>& endpoint, RegionKey key,
                            Nanos timeout = kLong);
  /// Counts a completion of Revoke.
  std::shared_ptr<Call> Revoke(Side& side, RegionKey key);

  /// Waits until `condition` holds; it runs under the mutex.
  [[nodiscard]] bool Wait(const std::function<bool()>& condition);
  [[nodiscard]] bool WaitFor(const std::shared_ptr<Call>& call);
  /// Changes what conditions read.
  void Update(const std::function<void()>& change);
  template <typename T>
  T Read(const std::function<T()>& read) {
    std::lock_guard lock(mutex_);
    return read();
  }
  /// Of the fake transport, from now on. No effect on the others.
  void SetFakeLink(Side& from, Side& to, transport::FakeLink link);

  const Kind& kind() const { return kind_; }
  bool is_fake() const { return kind_.backend == "fake"; }

 private:
  friend class Recorder;
  void Record(const std::shared_ptr<Call>& call, const std::function<void(Call&)>& outcome);

  const Kind kind_;
  std::recursive_mutex mutex_;
  std::condition_variable_any changed_;
  testing::SimExecutor sim_;
  transport::FakeNetwork network_;
  uint64_t sides_made_ = 0;
};

/// A region of pattern bytes starting at `first_index`, and pieces of it.
std::shared_ptr<memory::MemoryRegion> PatternRegion(uint64_t bytes, uint64_t first_index = 0);
/// The same, lent by a fake GPU.
std::shared_ptr<memory::MemoryRegion> PatternSlab(size_t gpu, uint64_t bytes, uint64_t first_index);
/// A copy of what is mapped, whatever memory it is of.
std::vector<std::byte> BytesOf(const transport::MappedPiece& piece);
/// Cuts [0, bytes) of `region` into `count` consecutive pieces of uneven sizes, some of them empty.
GatherList CutPieces(const std::shared_ptr<memory::MemoryRegion>& region, size_t count,
                     std::mt19937_64& random);
/// Cuts `buffer` likewise.
std::vector<MutableSpan> CutSpans(std::span<std::byte> buffer, size_t count,
                                  std::mt19937_64& random);
/// From WEIGHTWIRE_SEED or 1; printed.
uint64_t Seed();

class Conformance : public ::testing::TestWithParam<Kind> {
 protected:
  Conformance() : rig(GetParam()) {}
  Rig rig;
};

inline std::string KindName(const ::testing::TestParamInfo<Kind>& info) { return info.param.name; }

}  // namespace weightwire::conformance
