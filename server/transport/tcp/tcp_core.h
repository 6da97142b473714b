#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "server/transport/export_table.h"
#include "server/transport/io_loop.h"
#include "server/transport/tcp/tcp_transport.h"

namespace weightwire::transport {

class TcpEndpoint;

/// Most requests of one session that a side may have under way; more is an offence.
inline constexpr uint32_t kTcpRequestsMax = 256;

/// What the endpoints of one transport share. Outlives the transport where endpoints are still
/// held; its loops have stopped then.
class TcpCore {
 public:
  explicit TcpCore(TcpOptions the_options);

  /// Handshakes run on loop 0.
  IoLoop& loop(size_t index) { return *loops_[index % loops_.size()]; }
  void StopLoops();
  /// Spreads the first sockets of sessions over the loops.
  size_t NextHome() { return next_home_.fetch_add(1, std::memory_order_relaxed); }

  void Add(std::shared_ptr<TcpEndpoint> endpoint);
  void Remove(uint64_t endpoint_id);
  size_t open_count();
  void CloseAll();
  void WaitUntilNoneIsLeft();
  void CountClose(const char* cause);
  /// A bound stopped the acceptor.
  void CountFull();

  const TcpOptions options;
  const std::string& name = options.name;
  Handler* handler = nullptr;  ///< set by Start, before anything reads it
  Incarnation self{};
  ExportTable exports;

 private:
  std::vector<std::unique_ptr<IoLoop>> loops_;
  std::atomic<size_t> next_home_{0};
  std::mutex mutex_;
  std::condition_variable none_left_;
  std::map<uint64_t, std::shared_ptr<TcpEndpoint>> endpoints_;
};

}  // namespace weightwire::transport
