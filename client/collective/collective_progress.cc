// How a call of Collective gets to its one end. NCCL is asked never to block, so every call returns
// at once and the outcome is looked for: first the communicator's own state, then an event behind
// the operation on the caller's stream. What may block all the same, giving a communicator back,
// runs on a thread of its own that is left behind when it does not end in time.
#include <algorithm>
#include <thread>
#include <utility>

#include "client/collective/collective.h"

namespace weightwire::collective {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr Nanos kPauseMin = microseconds(20);
constexpr Nanos kPauseMax = milliseconds(2);
constexpr int kPauseShare = 8;  // of the time that it has taken so far: so late is the end noticed

/// Shared with a thread that may outlive the Collective.
struct Finished {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

}  // namespace

Status Collective::At(Status status) const {
  return std::move(status).AtRank(std::to_string(rank_) + " of " + std::to_string(size_));
}

Status Collective::NcclFailed(const char* what, int result) const {
  const char* last = comm_ == nullptr ? nullptr : nccl_.ncclGetLastError(comm_);
  std::string text = std::string(what) + ": " + nccl_.ncclGetErrorString(result);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  switch (result) {
    case nccl::kRemoteError:
      return At(Status(Code::kAborted, Reason::kMemberLost, std::move(text))
                    .Remedy("report the loss and form again under a new epoch"));
    case nccl::kSystemError:
      return At(Status(Code::kUnavailable, Reason::kTransportFailed, std::move(text))
                    .Remedy("see NCCL_DEBUG=WARN; form again under a new epoch"));
    case nccl::kInvalidArgument:
    case nccl::kInvalidUsage:
      return At(Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::move(text))
                    .Remedy("do all members agree on sizes, roots and order?"));
    default:
      return At(Status(Code::kInternal, Reason::kInternal, std::move(text))
                    .Remedy("see NCCL_DEBUG=WARN"));
  }
}

Status Collective::EventFailed(const char* what) const {
  return At(Status(Code::kInternal, Reason::kInternal,
                   std::string(what) + ": " + events_.ww_cuda_error()));
}

Status Collective::Enqueued(const char* what, int result) {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return OkStatus();
  return NcclFailed(what, result);
}

Result<bool> Collective::CommReady(const char* what) {
  int error = nccl::kSuccess;
  const int result = nccl_.ncclCommGetAsyncError(comm_, &error);
  if (result != nccl::kSuccess) return Fail(NcclFailed(what, result));
  if (error == nccl::kInProgress) return false;
  if (error != nccl::kSuccess) return Fail(NcclFailed(what, error));
  return true;
}

Result<bool> Collective::StreamReached(const char* what) {
  WW_ASSIGN(const bool ready, CommReady(what));
  const int32_t reached = events_.ww_cuda_event_query(options_.device, event_);
  if (reached == WW_CUDA_NOT_READY) return false;
  if (reached != WW_CUDA_OK) return Fail(EventFailed(what));
  return ready;
}

Status Collective::Poll(const char* what, Clock::time_point end,
                        const std::function<Result<bool>()>& look) {
  for (const auto begin = Clock::now();;) {
    WW_ASSIGN_OR_STATUS(const bool done, look());
    std::unique_lock lock(mutex_);
    if (state_.state() == State::kAborting) return state_.why();
    if (done) return OkStatus();
    const auto now = Clock::now();
    if (now >= end) {
      return At(Status(Code::kDeadlineExceeded, Reason::kDeadlineExceeded,
                       std::string(what) + " did not end in time in communicator epoch " +
                           std::to_string(state_.epoch()))
                    .Remedy("a member is lost, slow or never called; report the loss and form "
                            "again under a new epoch"));
    }
    const Nanos pause = std::clamp<Nanos>((now - begin) / kPauseShare, kPauseMin, kPauseMax);
    changed_.wait_until(lock, std::min(end, now + pause));
  }
}

Status Collective::Drive(const char* what, void* stream, Clock::time_point end,
                         const std::function<int()>& enqueue) {
  stream_ = stream;
  on_stream_ = true;
  WW_RETURN_IF_ERROR(Enqueued(what, enqueue()));
  WW_RETURN_IF_ERROR(Poll(what, end, [&, this] { return CommReady(what); }));
  if (events_.ww_cuda_event_record(options_.device, event_, stream) != WW_CUDA_OK) {
    return EventFailed(what);
  }
  WW_RETURN_IF_ERROR(Poll(what, end, [&, this] { return StreamReached(what); }));
  on_stream_ = false;
  return OkStatus();
}

// The one place where a blocking call ends: Ready, or aborted with the reason that came first.
Status Collective::Settle(Status status) {
  {
    std::lock_guard lock(mutex_);
    if (status.ok() && state_.Done()) return OkStatus();
    state_.Fail(std::move(status));
    status = state_.why();
  }
  Release(nccl_.ncclCommAbort);
  return state() == State::kStuck ? Stuck(status.message() + "; and ") : status;
}

Status Collective::Stuck(const std::string& after) const {
  return At(Status(Code::kInternal, Reason::kInternal,
                   after + "NCCL did not let go of the communicator in time: the buffers must "
                           "stay as they are")
                .Remedy("end this process"));
}

bool Collective::LetGo(int (*how)(nccl::Comm), Clock::time_point end) {
  if (comm_ == nullptr) return true;
  auto finished = std::make_shared<Finished>();
  std::thread giver([finished, how, comm = std::exchange(comm_, nullptr)] {
    how(comm);
    std::lock_guard lock(finished->mutex);
    finished->done = true;
    finished->changed.notify_all();
  });
  std::unique_lock lock(finished->mutex);
  const bool done = finished->changed.wait_until(lock, end, [&] { return finished->done; });
  lock.unlock();
  if (done) {
    giver.join();
  } else {
    giver.detach();
  }
  return done;
}

// The event may have been recorded before all of the work was there, or never: once more.
bool Collective::StreamDrained(Clock::time_point end) {
  if (!on_stream_) return true;
  if (events_.ww_cuda_event_record(options_.device, event_, stream_) != WW_CUDA_OK) return false;
  for (Nanos pause = kPauseMin;; pause = std::min(2 * pause, kPauseMax)) {
    const int32_t reached = events_.ww_cuda_event_query(options_.device, event_);
    if (reached != WW_CUDA_NOT_READY) return reached == WW_CUDA_OK;
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
  }
}

void Collective::Release(int (*how)(nccl::Comm)) {
  const auto end = Clock::now() + options_.release_grace;
  const bool in_time = LetGo(how, end) && StreamDrained(end);
  if (event_ != nullptr) events_.ww_cuda_event_destroy(options_.device, event_);
  event_ = nullptr;
  on_stream_ = false;
  std::lock_guard lock(mutex_);
  state_.Released(in_time);
}

}  // namespace weightwire::collective
