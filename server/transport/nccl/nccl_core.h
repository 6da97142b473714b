#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/base/thread_executor.h"
#include "server/transport/export_table.h"
#include "server/transport/nccl/nccl_library.h"
#include "server/transport/nccl/nccl_memory.h"
#include "server/transport/nccl/nccl_transport.h"

namespace weightwire::transport {

class NcclEndpoint;

/// What the endpoints of one transport share. Outlives the transport where endpoints are still
/// held; its threads have ended then.
class NcclCore {
 public:
  explicit NcclCore(NcclOptions the_options);

  /// One GPU, and buffers for what goes out of it and comes in.
  struct Gpu {
    std::shared_ptr<device::Device> device;
    NcclBuffers sending;
    NcclBuffers receiving;
  };
  bool has_gpus() const { return !gpus_.empty(); }
  const std::vector<std::unique_ptr<Gpu>>& gpus() const { return gpus_; }
  /// Whose lane reads into memory of `device`; the first for memory of the host, or a GPU that is
  /// not ours.
  uint32_t LaneOf(const device::Device* device) const;
  /// The peer's lane `lane` meets this GPU of ours.
  Gpu& GpuOf(uint32_t lane) { return *gpus_[lane % gpus_.size()]; }

  /// Runs `task` on the transport's thread, after what was posted before. When that has ended, at
  /// once.
  void Post(Task task);
  void PostAfter(Nanos delay, Task task) { home_.PostAfter(delay, std::move(task)); }
  /// Runs `task`, which may block for release_grace, elsewhere.
  void PostSlow(Nanos delay, Task task) { slow_.PostAfter(delay, std::move(task)); }

  void Add(uint64_t inner, std::shared_ptr<NcclEndpoint> endpoint);
  std::shared_ptr<NcclEndpoint> Find(uint64_t inner);
  void Remove(uint64_t inner);
  void WaitUntilNoneIsLeft();
  /// Ends the threads, when what was posted has run.
  void Stop();

  /// NCCL has kept a communicator: no more are made.
  void SetStuck(const std::string& why);
  Status stuck();

  ExportTable& exports() { return exports_; }

  const NcclOptions options;
  const Result<std::shared_ptr<const NcclLibrary>> library;
  const std::string& name = options.sessions.name;
  Handler* handler = nullptr;  ///< set by Start, before anything reads it

 private:
  std::vector<std::unique_ptr<Gpu>> gpus_;
  std::mutex mutex_;
  std::condition_variable none_left_;
  std::map<uint64_t, std::shared_ptr<NcclEndpoint>> endpoints_;  ///< by the inner endpoint's id
  Status stuck_;
  bool stopped_ = false;
  ThreadExecutor home_;
  ThreadExecutor slow_;
  ExportTable exports_;
};

}  // namespace weightwire::transport
