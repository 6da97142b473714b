#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "server/base/thread_executor.h"
#include "server/transport/export_table.h"
#include "server/transport/io_loop.h"
#include "server/transport/local_transport.h"

namespace weightwire::transport {

class LocalEndpoint;

/// Most requests of one session that a side may have under way; more is an offence.
inline constexpr uint32_t kLocalRequestsMax = 256;

/// What the endpoints of one transport share. Outlives the transport where endpoints are still
/// held; its threads have ended then.
class LocalCore {
 public:
  /// `devices` null: host memory only.
  LocalCore(std::string the_name, LocalOptions the_options,
            std::unique_ptr<LocalDevices> the_devices);

  void CountClose(const char* cause);
  /// A bound stopped the acceptor.
  void CountFull();
  // On the loop.
  void Add(std::shared_ptr<LocalEndpoint> endpoint);
  void Remove(const LocalEndpoint& endpoint);
  size_t open_count() const { return endpoints_.size(); }
  void CloseAll();
  /// Tells the peers which regions they may forget.
  void ForgetDeadRegions();
  /// Memory of the host, of this process, which a peer is sent.
  void NoteSent(const std::shared_ptr<memory::MemoryRegion>& region);
  /// Whether what a peer sent as `id` is a region of this process, which has sent it to itself.
  bool IsOurs(uint64_t id, const memory::UniqueFd& fd) const;
  /// Null once it is gone.
  std::shared_ptr<memory::MemoryRegion> Ours(uint64_t id) const;
  // Not on the loop.
  void WaitUntilNoneIsLeft();

  const LocalOptions options;
  const std::string name;
  const std::unique_ptr<LocalDevices> devices;
  Handler* handler = nullptr;  ///< set by Start, before anything reads it
  Incarnation self{};
  IoLoop loop;
  ThreadExecutor copiers;
  ExportTable exports;

 private:
  std::map<uint64_t, std::shared_ptr<LocalEndpoint>> endpoints_;
  std::map<uint64_t, std::weak_ptr<memory::MemoryRegion>> sent_;  ///< of the host, by id
  std::mutex mutex_;
  std::condition_variable none_left_;
  size_t count_ = 0;  ///< of endpoints_, guarded by mutex_
};

}  // namespace weightwire::transport
