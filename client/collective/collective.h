#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "client/collective/collective_state.h"
#include "client/collective/libraries.h"
#include "server/base/clock.h"

namespace weightwire::collective {

struct Options {
  std::string nccl_library = "libnccl.so.2";
  std::string cuda_library = "libweightwire_cuda.so";
  int32_t device = 0;  ///< where events are made; the callers' current device
  /// For NCCL to let go of a communicator after an abort, on top of an operation's deadline.
  Nanos release_grace = std::chrono::seconds(10);
};

/// One side of an exchange with one peer.
struct Piece {
  void* data = nullptr;
  size_t bytes = 0;
  uint32_t peer = 0;
};

/// One member of NCCL communicators that follow one another, each under its own epoch.
///
/// Form, Broadcast, Exchange and Close block the caller, who waits asleep between looks at NCCL,
/// and end exactly once: OK, or a failure after which the communicator has been aborted and the
/// buffers are free again (state Unformed: form anew), or, when NCCL did not let go within
/// release_grace, kInternal with state Stuck: then the buffers must stay until the process ends.
/// One of them at a time; Abort, state and epoch from any thread. The callers' current CUDA device
/// is `device`.
class Collective {
 public:
  using Clock = std::chrono::steady_clock;
  ///   kUnavailable / kTransportFailed  a library is not there
  static Result<std::unique_ptr<Collective>> Open(Options options);
  /// Aborts what is formed. No call is under way.
  ~Collective();
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

  /// For rank 0: what the others need to find it. Good for one Form.
  Result<nccl::UniqueId> MakeUniqueId();
  ///   kStaleEpoch | kNotReady   wrong moment; nothing changed. So, too, for kInvalidRequest when
  ///   it
  ///                             names an argument: the communicator stays.
  ///   kDeadlineExceeded | kMemberLost | kTransportFailed | kAbortRequested | …  aborted
  Status Form(const nccl::UniqueId& id, uint32_t rank, uint32_t size, uint64_t epoch,
              Nanos deadline);
  /// Root's bytes to everybody's `data`.
  Status Broadcast(void* data, size_t bytes, uint32_t root, void* stream, Nanos deadline);
  /// All of it at once: no order among sends and receives is needed to avoid a standstill.
  Status Exchange(std::span<const Piece> sends, std::span<const Piece> receives, void* stream,
                  Nanos deadline);
  /// Ends what runs, which then fails with `why`; or takes a ready communicator apart.
  Status Abort(const std::string& why);
  /// Waits until NCCL has flushed, at most `deadline`, then gives everything back. Idempotent.
  Status Close(Nanos deadline);

  State state() const;
  uint64_t epoch() const;
  /// As NCCL counts.
  int32_t nccl_version() const;

 private:
  Collective(Options options, const Libraries& libraries)
      : options_(std::move(options)), nccl_(libraries.nccl), events_(libraries.events) {}

  Status StartForm(const nccl::UniqueId& id, uint32_t rank, uint32_t size, Clock::time_point end);
  Status Begin();
  /// Back to Ready: nothing was enqueued.
  Status Refuse(std::string why);
  Status Drive(const char* what, void* stream, Clock::time_point end,
               const std::function<int()>& enqueue);
  /// To Ready, or through Aborting.
  Status Settle(Status status);
  Status Stuck(const std::string& after) const;
  /// Sleeps between looks until `look` says true, an abort came or the time is over.
  Status Poll(const char* what, Clock::time_point end, const std::function<Result<bool>()>& look);
  Result<bool> CommReady(const char* what);
  Result<bool> StreamReached(const char* what);
  Status Enqueued(const char* what, int result);
  Status NcclFailed(const char* what, int result) const;
  Status EventFailed(const char* what) const;
  Status At(Status status) const;

  void Release(int (*how)(nccl::Comm));
  bool LetGo(int (*how)(nccl::Comm), Clock::time_point end);
  bool StreamDrained(Clock::time_point end);

  const Options options_;
  const nccl::Functions nccl_;
  const EventFunctions events_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  CollectiveState state_;  ///< under mutex_
  // Of the thread that forms, runs or aborts; states keep others out.
  nccl::Comm comm_ = nullptr;
  uint32_t rank_ = 0, size_ = 0;
  void* event_ = nullptr;
  void* stream_ = nullptr;
  bool on_stream_ = false;  ///< an operation may have put work there that has not ended
};

}  // namespace weightwire::collective
