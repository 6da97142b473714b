// UCX calls back in the middle of its own work, where little is allowed. So a callback only notes
// an event; Progress reports the notes when UCX has returned.
//
// Endpoints are in error mode PEER: only then does a read end when its peer is killed. They are
// closed by force: UCX then drops what it still has to send or to answer, so that no memory is
// touched when the close has ended, even if the peer is stopped.
#include <netinet/in.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "server/transport/ucx/ucx_plugin.h"

namespace weightwire::transport {
namespace {

constexpr unsigned kMessageId = 1;
/// UCX reads a remote key without knowing its length: what it reads beyond is ours, and zero.
constexpr size_t kKeyPadding = 4096;

struct Setting {
  const char* name;
  const char* value;
};
/// Ours unless the environment has its own. A killed peer is noticed by keepalive.
constexpr Setting kSettings[] = {{"KEEPALIVE_INTERVAL", "1s"}, {"RNDV_THRESH", "inf"}};

std::string Words(const char* what, ucs_status_t status) {
  return std::string(what) + ": " + ucs_status_string(status);
}

/// stdout belongs to the program: what UCX warns of goes to stderr.
ucs_log_func_rc_t LogToStderr(const char*, unsigned, const char* function, ucs_log_level_t level,
                              const ucs_log_component_config_t*, const char* format, va_list list) {
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_STOP;
  char text[512];
  std::vsnprintf(text, sizeof(text), format, list);
  std::fprintf(stderr, "ucx: %s: %s\n", function, text);
  return UCS_LOG_FUNC_RC_STOP;
}

/// "tcp/lo" of "#   lane[0]:  2:tcp/lo.0 md[1] …", empty of any other line.
std::string LaneOf(const std::string& line) {
  const size_t lane = line.find(" lane[");
  const size_t colon = lane == std::string::npos ? lane : line.find("]:", lane);
  if (colon == std::string::npos) return {};
  std::string number_and_name;
  std::istringstream(line.substr(colon + 2)) >> number_and_name;
  const std::string name = number_and_name.substr(number_and_name.find(':') + 1);
  if (name.find('/') == std::string::npos) return {};  // "cm": it carries no bytes
  return name.substr(0, name.rfind('.'));
}

/// "tcp/lo" of "#      resource 2  :  md 1  dev 2  flags -- tcp/lo", empty of any other line.
std::string ResourceOf(const std::string& line) {
  const size_t space = line.rfind(' ');
  const bool resource = line.find(" resource ") != std::string::npos && space != std::string::npos;
  std::string name = resource ? line.substr(space + 1) : "";
  return name.find('/') == std::string::npos ? "" : name;
}

/// What `name_of` finds in what UCX prints for people: 1.13 tells it in no other way.
template <typename Print>
std::vector<std::string> NamesIn(Print print, std::string (*name_of)(const std::string& line)) {
  char* text = nullptr;
  size_t bytes = 0;
  std::FILE* out = open_memstream(&text, &bytes);
  if (out == nullptr) return {};
  print(out);
  std::fclose(out);
  std::istringstream lines(std::string(text, bytes));
  std::free(text);
  std::set<std::string> names;
  for (std::string line; std::getline(lines, line);) {
    if (std::string name = name_of(line); !name.empty()) names.insert(std::move(name));
  }
  return {names.begin(), names.end()};
}

struct Connection {
  uint64_t id = 0;
  ucp_ep_h endpoint = nullptr;
  size_t under_way = 0;  ///< reads, messages and the close
  bool closing = false;
};

struct Event {
  enum class Kind { kCaller, kMessage, kSent, kRead, kBroken, kClosed };
  Kind kind = Kind::kCaller;
  uint64_t connection = 0;
  void* request = nullptr;
  uint64_t cookie = 0;
  std::string text = {};
  std::vector<std::byte> message = {};
};

class Worker final : public UcxWorker {
 public:
  ~Worker() override {
    if (listener_ != nullptr) ucp_listener_destroy(listener_);
    if (worker_ != nullptr) ucp_worker_destroy(worker_);
    if (context_ != nullptr) ucp_cleanup(context_);
  }

  std::string Open(const UcxWorkerOptions& options) {
    static std::once_flag once;
    std::call_once(once, [] {
      ucs_log_push_handler(LogToStderr);
      // posix and cma are left out in error mode PEER unless they are told to handle errors, which
      // ucp_config_modify of 1.13 does not reach.
      setenv("UCX_POSIX_ERROR_HANDLING", "y", 0);
      unsigned major = 0;
      unsigned minor = 0;
      unsigned release = 0;
      ucp_get_version(&major, &minor, &release);
      if (std::pair(major, minor) < std::pair(1u, 22u)) {
        std::fprintf(
            stderr,
            "ucx: libucp %u.%u can crash when a peer dies over tcp; install 1.22 or newer\n", major,
            minor);
      }
    });
    ucp_config_t* config = nullptr;
    ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) return Words("ucp_config_read", status);
    for (const Setting& setting : kSettings) {
      if (std::getenv((std::string("UCX_") + setting.name).c_str()) == nullptr) {
        static_cast<void>(ucp_config_modify(config, setting.name, setting.value));
      }
    }
    if (options.rma_rails > 0 && std::getenv("UCX_MAX_RMA_RAILS") == nullptr) {
      // 1.13 has no such setting: it reads by one device.
      const std::string rails = std::to_string(options.rma_rails);
      static_cast<void>(ucp_config_modify(config, "MAX_RMA_RAILS", rails.c_str()));
    }
    if (!options.net_devices.empty()) {
      status = ucp_config_modify(config, "NET_DEVICES", options.net_devices.c_str());
    }
    if (status == UCS_OK && !options.tls.empty()) {
      status = ucp_config_modify(config, "TLS", options.tls.c_str());
    }
    if (status == UCS_OK) {
      ucp_params_t params{};
      params.field_mask = UCP_PARAM_FIELD_FEATURES;
      params.features = UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP;
      status = ucp_init(&params, config, &context_);
    }
    ucp_config_release(config);
    if (status != UCS_OK) return Words("ucp_init", status);
    return OpenWorker();
  }

  std::vector<std::string> Resources() const override {
    return NamesIn([&](std::FILE* out) { ucp_context_print_info(context_, out); }, ResourceOf);
  }

  bool KnowsCuda() const override {
    ucp_context_attr_t attributes{};
    attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    return ucp_context_query(context_, &attributes) == UCS_OK &&
           (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0;
  }

  int event_fd() const override { return event_fd_; }

  bool Progress(UcxEvents& events) override {
    const bool worked = ucp_worker_progress(worker_) != 0;
    if (events_.empty()) return worked;
    for (Event& event : std::exchange(events_, {})) Report(event, events);
    return true;
  }

  bool Arm() override { return events_.empty() && ucp_worker_arm(worker_) == UCS_OK; }

  std::string Listen(const sockaddr* address, size_t address_bytes, uint16_t& port) override {
    ucp_listener_params_t params{};
    params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
    params.sockaddr = {address, static_cast<socklen_t>(address_bytes)};
    params.conn_handler = {OnConnectionRequest, this};
    ucs_status_t status = ucp_listener_create(worker_, &params, &listener_);
    if (status != UCS_OK) {
      listener_ = nullptr;
      return Words("ucp_listener_create", status);
    }
    ucp_listener_attr_t attributes{};
    attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
    status = ucp_listener_query(listener_, &attributes);
    if (status != UCS_OK) return Words("ucp_listener_query", status);
    if (attributes.sockaddr.ss_family == AF_INET6) {
      port = ntohs(reinterpret_cast<const sockaddr_in6*>(&attributes.sockaddr)->sin6_port);
    } else {
      port = ntohs(reinterpret_cast<const sockaddr_in*>(&attributes.sockaddr)->sin_port);
    }
    return {};
  }

  void StopListening() override {
    if (listener_ != nullptr) ucp_listener_destroy(std::exchange(listener_, nullptr));
  }

  uint64_t Connect(const sockaddr* address, size_t address_bytes, std::string& failure) override {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
    params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
    params.sockaddr = {address, static_cast<socklen_t>(address_bytes)};
    return Create(params, failure);
  }

  uint64_t Accept(void* request, std::string& failure) override {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
    params.conn_request = static_cast<ucp_conn_request_h>(request);
    return Create(params, failure);
  }

  void Reject(void* request) override {
    if (listener_ == nullptr) return;  // the listener took its requests with it
    static_cast<void>(ucp_listener_reject(listener_, static_cast<ucp_conn_request_h>(request)));
  }

  void Send(uint64_t id, std::span<const std::byte> message, bool report) override {
    Connection& connection = *connections_.at(id);
    auto* sending = new Sending{this, &connection, report, {message.begin(), message.end()}};
    ucp_request_param_t param{};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    param.cb.send = OnSendDone;
    param.user_data = sending;
    ++connection.under_way;
    const ucs_status_ptr_t request =
        ucp_am_send_nbx(connection.endpoint, kMessageId, nullptr, 0, sending->message.data(),
                        sending->message.size(), &param);
    if (UCS_PTR_IS_PTR(request)) return;
    sending->End(UCS_PTR_STATUS(request));
  }

  std::vector<std::string> Lanes(uint64_t id) override {
    return NamesIn([&](std::FILE* out) { ucp_ep_print_info(connections_.at(id)->endpoint, out); },
                   LaneOf);
  }

  void Close(uint64_t id) override {
    Connection& connection = *connections_.at(id);
    if (std::exchange(connection.closing, true)) return;
    ids_.erase(connection.endpoint);
    ucp_request_param_t param{};
    param.op_attr_mask =
        UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    param.cb.send = OnCloseDone;
    auto* closing = new Closing{this, &connection};
    param.user_data = closing;
    ++connection.under_way;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(connection.endpoint, &param);
    if (UCS_PTR_IS_PTR(request)) return;
    closing->End();
  }

  std::string Register(std::byte* data, size_t bytes, UcxKind kind, UcxMemory& memory) override {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                        UCP_MEM_MAP_PARAM_FIELD_PROT;
    params.address = data;
    params.length = bytes;
    params.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ;
    if (kind == UcxKind::kCuda) {
      // UCX would look at the memory of a type that it does not know as if it were the host's.
      if (!KnowsCuda()) return "this libucp reaches no CUDA memory";
      params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
      params.memory_type = UCS_MEMORY_TYPE_CUDA;
      params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE;
    }
    ucp_mem_h handle = nullptr;
    ucs_status_t status = ucp_mem_map(context_, &params, &handle);
    if (status != UCS_OK) return Words("ucp_mem_map", status);
    void* key = nullptr;
    size_t key_bytes = 0;
    status = ucp_rkey_pack(context_, handle, &key, &key_bytes);
    if (status != UCS_OK) {
      static_cast<void>(ucp_mem_unmap(context_, handle));
      return Words("ucp_rkey_pack", status);
    }
    memory.kind = kind;
    memory.handle = handle;
    memory.remote_key.assign(static_cast<const char*>(key), key_bytes);
    ucp_rkey_buffer_release(key);
    return {};
  }

  void Release(const UcxMemory& memory) override {
    static_cast<void>(ucp_mem_unmap(context_, static_cast<ucp_mem_h>(memory.handle)));
  }

  void* ImportKey(uint64_t id, std::span<const std::byte> remote_key) override {
    std::vector<std::byte> padded(remote_key.begin(), remote_key.end());
    padded.resize(remote_key.size() + kKeyPadding);
    ucp_rkey_h key = nullptr;
    const ucs_status_t status =
        ucp_ep_rkey_unpack(connections_.at(id)->endpoint, padded.data(), &key);
    return status == UCS_OK ? key : nullptr;
  }

  void ReleaseKey(void* key) override { ucp_rkey_destroy(static_cast<ucp_rkey_h>(key)); }

  void Read(uint64_t id, void* key, uint64_t remote_address, std::byte* into, size_t bytes,
            const UcxMemory* registered, uint64_t cookie) override {
    Connection& connection = *connections_.at(id);
    auto* reading = new Reading{this, &connection, cookie};
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
    param.cb.send = OnReadDone;
    param.user_data = reading;
    if (registered != nullptr && registered->kind == UcxKind::kCuda) {
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE;
      param.memory_type = UCS_MEMORY_TYPE_CUDA;
#if UCP_API_VERSION >= UCP_VERSION(1, 14)
      // Before, UCX finds the registration by its cache.
      param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMH;
      param.memh = static_cast<ucp_mem_h>(registered->handle);
#endif
    }
    ++connection.under_way;
    const ucs_status_ptr_t request = ucp_get_nbx(connection.endpoint, into, bytes, remote_address,
                                                 static_cast<ucp_rkey_h>(key), &param);
    if (UCS_PTR_IS_PTR(request)) return;
    reading->End(UCS_PTR_STATUS(request));
  }

 private:
  struct Sending {
    Worker* worker;
    Connection* connection;
    bool report;
    std::vector<std::byte> message;
    void End(ucs_status_t) {
      if (report) {
        worker->Note({.kind = Event::Kind::kSent, .connection = connection->id});
      }
      worker->OneLess(*connection);
      delete this;
    }
  };
  struct Reading {
    Worker* worker;
    Connection* connection;
    uint64_t cookie;
    void End(ucs_status_t status) {
      worker->Note({.kind = Event::Kind::kRead,
                    .connection = connection->id,
                    .cookie = cookie,
                    .text = status == UCS_OK ? "" : ucs_status_string(status)});
      worker->OneLess(*connection);
      delete this;
    }
  };
  struct Closing {
    Worker* worker;
    Connection* connection;
    void End() {
      worker->OneLess(*connection);
      delete this;
    }
  };

  std::string OpenWorker() {
    ucp_worker_params_t params{};
    params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    params.thread_mode = UCS_THREAD_MODE_SINGLE;
    ucs_status_t status = ucp_worker_create(context_, &params, &worker_);
    if (status != UCS_OK) return Words("ucp_worker_create", status);
    status = ucp_worker_get_efd(worker_, &event_fd_);
    if (status != UCS_OK) return Words("ucp_worker_get_efd", status);
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                         UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessageId;
    handler.flags = UCP_AM_FLAG_WHOLE_MSG;
    handler.cb = OnActiveMessage;
    handler.arg = this;
    status = ucp_worker_set_am_recv_handler(worker_, &handler);
    return status == UCS_OK ? std::string() : Words("ucp_worker_set_am_recv_handler", status);
  }

  uint64_t Create(ucp_ep_params_t& params, std::string& failure) {
    auto connection = std::make_unique<Connection>();
    connection->id = next_id_++;
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {OnError, this};
    const ucs_status_t status = ucp_ep_create(worker_, &params, &connection->endpoint);
    if (status != UCS_OK) {
      failure = Words("ucp_ep_create", status);
      return 0;
    }
    const uint64_t id = connection->id;
    ids_.emplace(connection->endpoint, id);
    connections_.emplace(id, std::move(connection));
    return id;
  }

  void Note(Event event) { events_.push_back(std::move(event)); }

  void OneLess(Connection& connection) {
    if (--connection.under_way > 0 || !connection.closing) return;
    Note({.kind = Event::Kind::kClosed, .connection = connection.id});
  }

  void Report(Event& event, UcxEvents& events) {
    switch (event.kind) {
      case Event::Kind::kCaller:
        return events.OnCaller(event.request);
      case Event::Kind::kMessage:
        return events.OnMessage(event.connection, event.message);
      case Event::Kind::kSent:
        return events.OnSent(event.connection);
      case Event::Kind::kRead:
        return events.OnRead(event.connection, event.cookie, event.text);
      case Event::Kind::kBroken:
        return events.OnBroken(event.connection, event.text);
      case Event::Kind::kClosed:
        connections_.erase(event.connection);
        return events.OnClosed(event.connection);
    }
  }

  static void OnConnectionRequest(ucp_conn_request_h request, void* self) {
    static_cast<Worker*>(self)->Note({.kind = Event::Kind::kCaller, .request = request});
  }

  static ucs_status_t OnActiveMessage(void* argument, const void*, size_t, void* data, size_t bytes,
                                      const ucp_am_recv_param_t* param) {
    auto* self = static_cast<Worker*>(argument);
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return UCS_OK;
    // Of nobody whom we know, or a rendezvous: no weightwire sends either.
    const auto id = self->ids_.find(param->reply_ep);
    if (id == self->ids_.end()) return UCS_OK;
    Event event{.kind = Event::Kind::kMessage, .connection = id->second};
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
      const auto* first = static_cast<const std::byte*>(data);
      event.message.assign(first, first + bytes);
    }
    self->Note(std::move(event));
    return UCS_OK;
  }

  static void OnError(void* argument, ucp_ep_h endpoint, ucs_status_t status) {
    auto* self = static_cast<Worker*>(argument);
    const auto id = self->ids_.find(endpoint);
    if (id == self->ids_.end()) return;
    self->Note({.kind = Event::Kind::kBroken,
                .connection = id->second,
                .text = ucs_status_string(status)});
  }

  static void OnSendDone(void* request, ucs_status_t status, void* sending) {
    static_cast<Sending*>(sending)->End(status);
    ucp_request_free(request);
  }
  static void OnReadDone(void* request, ucs_status_t status, void* reading) {
    static_cast<Reading*>(reading)->End(status);
    ucp_request_free(request);
  }
  static void OnCloseDone(void* request, ucs_status_t, void* closing) {
    static_cast<Closing*>(closing)->End();
    ucp_request_free(request);
  }

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  int event_fd_ = -1;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_map<ucp_ep_h, uint64_t> ids_;  ///< of open ones
  std::vector<Event> events_;
};

}  // namespace
}  // namespace weightwire::transport

extern "C" {

__attribute__((visibility("default"))) uint32_t weightwire_ucx_abi() {
  return weightwire::transport::kUcxPluginAbi;
}

__attribute__((visibility("default"))) weightwire::transport::UcxWorker* weightwire_ucx_make_worker(
    const weightwire::transport::UcxWorkerOptions& options, std::string& failure) {
  auto worker = std::make_unique<weightwire::transport::Worker>();
  failure = worker->Open(options);
  return failure.empty() ? worker.release() : nullptr;
}
}
