#pragma once

#include <boost/asio/posix/stream_descriptor.hpp>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "server/transport/export_table.h"
#include "server/transport/io_loop.h"
#include "server/transport/ucx/ucx_plugin.h"
#include "server/transport/ucx/ucx_registry.h"
#include "server/transport/ucx/ucx_transport.h"

namespace weightwire::transport {

/// Most requests of one session that a side may have under way; more is an offence.
inline constexpr uint32_t kUcxRequestsMax = 256;

/// What a connection of the plug-in is to us: a pending connection, a dial or a session. On the
/// loop.
class UcxConnection {
 public:
  virtual ~UcxConnection() = default;
  virtual void OnMessage(std::span<const std::byte> message) = 0;
  virtual void OnSent() {}
  virtual void OnRead(uint64_t /*request*/, const std::string& /*failure*/) {}
  virtual void OnBroken(const std::string& why) = 0;
  /// The last call.
  virtual void OnClosed() {}
  /// Memory of ours is gone, and its key with it: by UcxRegistered::id.
  virtual void OnRegionGone(uint64_t /*registered*/) {}
  /// The transport ends.
  virtual void Shut() = 0;
};

/// What the connections of one transport share: the worker, and the thread that drives it. Outlives
/// the transport where endpoints are still held; its loop has stopped then.
class UcxCore final : private UcxEvents {
 public:
  explicit UcxCore(UcxOptions the_options);

  /// OK, or why there is no worker.
  const Status& viable() const { return viable_; }
  /// Which devices it uses and why.
  const std::string& choices() const { return choices_; }
  /// Exports and Gets may be of GPU memory.
  bool gpu_direct() const { return gpu_direct_; }
  /// Runs `task` on the loop, then UCX. After Stop: at once.
  void Post(Task task);
  void CountClose(const char* cause);
  /// A bound turned a caller away.
  void CountFull();

  // On the loop.
  UcxWorker& worker() { return *worker_; }
  /// From now on `connection` hears of `id`.
  void Bind(uint64_t id, std::shared_ptr<UcxConnection> connection);
  void ShutAll();
  void SessionOpened() { ShowSessions(++sessions_); }
  void SessionClosed() { ShowSessions(--sessions_); }
  /// It passed its self-test over `lanes`; SessionLeft follows when it ends.
  void SessionProved(const std::string& lanes, double bytes_per_second);
  void SessionLeft(const std::string& lanes);
  void CountSelfTest(const char* result);
  size_t session_count() const { return sessions_; }
  /// What UCX has registered.
  UcxRegistry& registry() { return registry_; }
  void ForgetDeadRegions();
  std::function<void(void* request)> on_caller;  ///< to be answered by worker()

  // Not on the loop.
  void WaitUntilNoneIsLeft();
  /// Ends the worker, then the loop.
  void Stop();

  const UcxOptions options;
  const std::string name = "ucx";
  Handler* handler = nullptr;  ///< set by Start, before anything reads it
  Incarnation self{};
  RegionKey self_test_key;  ///< set by the listener, before there is a connection
  IoLoop loop;
  ExportTable exports;

 private:
  void OpenWorker();
  void Kick();
  void Drive();
  void Await();
  void ShowSessions(size_t count);
  std::shared_ptr<UcxConnection> Find(uint64_t id) const;

  void OnCaller(void* request) override { on_caller(request); }
  void OnMessage(uint64_t connection, std::span<const std::byte> message) override;
  void OnSent(uint64_t connection) override;
  void OnRead(uint64_t connection, uint64_t cookie, const std::string& failure) override;
  void OnBroken(uint64_t connection, const std::string& why) override;
  void OnClosed(uint64_t connection) override;

  Status viable_;
  std::string choices_;
  bool gpu_direct_ = false;
  std::unique_ptr<UcxWorker> worker_;  ///< null before it is made and once stopped
  std::optional<boost::asio::posix::stream_descriptor> event_;
  bool driving_ = false;  ///< Drive is posted
  Nanos worked_{0};       ///< when UCX last had work
  bool waiting_ = false;  ///< for event_
  UcxRegistry registry_;
  std::map<uint64_t, std::shared_ptr<UcxConnection>> connections_;
  size_t sessions_ = 0;
  std::map<std::string, size_t> proved_;  ///< sessions by what UCX chose for them
  std::mutex mutex_;
  std::condition_variable none_left_;
  size_t count_ = 0;  ///< of connections_, guarded by mutex_
};

}  // namespace weightwire::transport
