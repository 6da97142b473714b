#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct sockaddr;

/// What libweightwire_ucx.so offers: UCX without UCX's headers, and without anything of ours but
/// this file, so that the daemon starts on hosts that have no libucp.
///
/// Connections are numbered by the plug-in, never 0 and never reused. Messages of one connection
/// arrive whole, at most once; the room numbers what must be in order.
namespace weightwire::transport {

/// Raised whenever this file changes; a plug-in of another number is refused.
inline constexpr uint32_t kUcxPluginAbi = 4;

/// Whose memory a range is.
enum class UcxKind : int { kHost = 0, kCuda = 1 };

/// A registered range: what a peer needs to read it, and what releases it.
struct UcxMemory {
  UcxKind kind = UcxKind::kHost;
  void* handle = nullptr;
  std::string remote_key;
};

/// Hears what happened, outside of every UCX callback: it may call the worker.
class UcxEvents {
 public:
  virtual ~UcxEvents() = default;
  /// A peer wants to connect. Accept or Reject it, once.
  virtual void OnCaller(void* request) = 0;
  virtual void OnMessage(uint64_t connection, std::span<const std::byte> message) = 0;
  /// A message that Send was asked to report needs no memory any more; it may have failed.
  virtual void OnSent(uint64_t connection) = 0;
  /// `failure` is empty when the bytes are there.
  virtual void OnRead(uint64_t connection, uint64_t cookie, const std::string& failure) = 0;
  virtual void OnBroken(uint64_t connection, const std::string& why) = 0;
  /// After Close, once: no buffer is touched any more, all reads have been reported.
  virtual void OnClosed(uint64_t connection) = 0;
};

/// One UCX context with one worker and at most one listener. All calls from one thread, except for
/// the constructor's. Functions that return a string return the failure, empty when there is none.
class UcxWorker {
 public:
  /// Every connection must have been closed, and every memory and remote key released.
  virtual ~UcxWorker() = default;

  /// What UCX may use here, "transport/device" each, sorted: {"cma/memory", "tcp/lo"}.
  virtual std::vector<std::string> Resources() const = 0;
  /// Whether UCX reaches the memory of CUDA devices.
  virtual bool KnowsCuda() const = 0;

  /// Readable when Progress has something to do, provided that Arm returned true.
  virtual int event_fd() const = 0;
  /// Runs UCX and reports to `events`. False when nothing happened.
  virtual bool Progress(UcxEvents& events) = 0;
  /// False: call Progress again first.
  virtual bool Arm() = 0;

  /// `port` is the bound one afterwards.
  virtual std::string Listen(const sockaddr* address, size_t address_bytes, uint16_t& port) = 0;
  virtual void StopListening() = 0;
  /// 0 and `failure` when it could not be made.
  virtual uint64_t Connect(const sockaddr* address, size_t address_bytes, std::string& failure) = 0;
  virtual uint64_t Accept(void* request, std::string& failure) = 0;
  virtual void Reject(void* request) = 0;
  /// Copies the message. OnSent follows, once, when `report`.
  virtual void Send(uint64_t connection, std::span<const std::byte> message, bool report) = 0;
  /// What UCX chose for the connection, "transport/device" each, sorted: {"cma/memory", "tcp/lo"}.
  /// Complete once something was read. Empty when UCX does not say.
  virtual std::vector<std::string> Lanes(uint64_t connection) = 0;
  /// Stops everything on the connection at once, whatever the peer does. OnClosed follows.
  virtual void Close(uint64_t connection) = 0;

  /// For peers to read. Also for reads into it, where it is CUDA's.
  virtual std::string Register(std::byte* data, size_t bytes, UcxKind kind, UcxMemory& memory) = 0;
  virtual void Release(const UcxMemory& memory) = 0;
  /// nullptr when the bytes are no key that this connection could use.
  virtual void* ImportKey(uint64_t connection, std::span<const std::byte> remote_key) = 0;
  virtual void ReleaseKey(void* key) = 0;
  /// `registered`: what covers `into`; null: host memory that UCX registers as it needs to.
  /// OnRead(connection, cookie) follows, once, before OnClosed.
  virtual void Read(uint64_t connection, void* key, uint64_t remote_address, std::byte* into,
                    size_t bytes, const UcxMemory* registered, uint64_t cookie) = 0;
};

struct UcxWorkerOptions {
  std::string tls = {};          ///< as UCX_TLS; empty: the environment's, or UCX's own choice
  std::string net_devices = {};  ///< as UCX_NET_DEVICES; likewise
  uint32_t rma_rails = 0;  ///< as UCX_MAX_RMA_RAILS, unless the environment has it; 0: likewise
};

/// The two symbols of the plug-in: its kUcxPluginAbi, and a worker or nullptr with `failure`.
using UcxPluginAbi = uint32_t (*)();
using MakeUcxWorkerFn = UcxWorker* (*)(const UcxWorkerOptions&, std::string& failure);
inline constexpr char kUcxPluginAbiSymbol[] = "weightwire_ucx_abi";
inline constexpr char kMakeUcxWorkerSymbol[] = "weightwire_ucx_make_worker";

}  // namespace weightwire::transport
