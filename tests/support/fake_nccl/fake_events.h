#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "client/collective/nccl_abi.h"
#include "kernels/cuda.h"

/// The events of libweightwire_cuda.so over what a fake NCCL enqueues: an event is reached when the
/// operations that its stream had when it was recorded are `over`. Callers hold a lock.
template <typename Operation>
class FakeEvents {
 public:
  void Enqueue(void* stream, std::shared_ptr<Operation> operation) {
    streams_[stream].push_back(std::move(operation));
  }
  void ForgetStreams() { streams_.clear(); }
  int live() const { return static_cast<int>(events_.size()); }

  int32_t Create(ww_cuda_event* event) {
    auto* made = new Event();
    events_.insert(made);
    *event = made;
    return WW_CUDA_OK;
  }
  int32_t Destroy(ww_cuda_event event) {
    if (events_.erase(static_cast<Event*>(event)) == 0) return WW_CUDA_INVALID;
    delete static_cast<Event*>(event);
    return WW_CUDA_OK;
  }
  int32_t Record(ww_cuda_event event, void* stream) {
    auto& work = streams_[stream];
    std::erase_if(work, [](const auto& operation) { return operation->over; });
    static_cast<Event*>(event)->waits_for = work;
    return WW_CUDA_OK;
  }
  int32_t Query(ww_cuda_event event) const {
    const auto& work = static_cast<Event*>(event)->waits_for;
    const bool over = std::ranges::all_of(work, [](const auto& o) { return o->over; });
    return over ? WW_CUDA_OK : WW_CUDA_NOT_READY;
  }

 private:
  struct Event {
    std::vector<std::shared_ptr<Operation>> waits_for;
  };
  std::map<void*, std::vector<std::shared_ptr<Operation>>> streams_;
  std::set<Event*> events_;
};

inline const char* FakeErrorText(int result) {
  namespace nccl = weightwire::collective::nccl;
  switch (result) {
    case nccl::kSystemError:
      return "fake system error";
    case nccl::kRemoteError:
      return "fake remote error";
    case nccl::kInvalidArgument:
      return "fake invalid argument";
    case nccl::kInvalidUsage:
      return "fake invalid usage";
    default:
      return "fake error";
  }
}

/// kernels/cuda.h, and NCCL's words for results, of a fake whose World() has a mutex and `events`.
#define FAKE_NCCL_REST(World)                                                                     \
  const char* ncclGetErrorString(int result) { return FakeErrorText(result); }                    \
  const char* ncclGetLastError(weightwire::collective::nccl::Comm) { return "told by the fake"; } \
  uint32_t ww_cuda_abi_version(void) { return WW_CUDA_ABI_VERSION; }                              \
  const char* ww_cuda_error(void) { return "fake event error"; }                                  \
  int32_t ww_cuda_event_create(int32_t, ww_cuda_event* event) {                                   \
    std::lock_guard lock(World().mutex);                                                          \
    return World().events.Create(event);                                                          \
  }                                                                                               \
  int32_t ww_cuda_event_destroy(int32_t, ww_cuda_event event) {                                   \
    std::lock_guard lock(World().mutex);                                                          \
    return World().events.Destroy(event);                                                         \
  }                                                                                               \
  int32_t ww_cuda_event_record(int32_t, ww_cuda_event event, ww_cuda_stream stream) {             \
    std::lock_guard lock(World().mutex);                                                          \
    return World().events.Record(event, stream);                                                  \
  }                                                                                               \
  int32_t ww_cuda_event_query(int32_t, ww_cuda_event event) {                                     \
    std::lock_guard lock(World().mutex);                                                          \
    return World().events.Query(event);                                                           \
  }                                                                                               \
  int fake_nccl_live_events(void) {                                                               \
    std::lock_guard lock(World().mutex);                                                          \
    return World().events.live();                                                                 \
  }
