// NCCL and the events of libweightwire_cuda.so for two ranks that may be two processes, over the
// memory of libfake_cuda.so: bytes go through a socket, in a thread of each communicator, so that
// nothing here blocks but what a fault asks for. It is as strict as NCCL where that matters: memory
// is of the communicator's GPU, which is the calling thread's current one.
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/collective/nccl_abi.h"
#include "tests/support/fake_cuda/fake_cuda.h"
#include "tests/support/fake_nccl/fake_events.h"
#include "tests/support/fake_nccl/fake_nccl.h"

namespace {

using namespace weightwire::collective;

struct Operation {
  bool send = false;
  std::byte* data = nullptr;  ///< where this process finds the bytes
  size_t bytes = 0;
  bool over = false;  ///< moved, or given up
};
using OperationPtr = std::shared_ptr<Operation>;

struct FakeComm {
  int rank = 0;
  int device = 0;
  int listener = -1;   ///< of rank 0
  sockaddr_un peer{};  ///< of rank 1: where it calls
  int socket = -1;
  int state = nccl::kInProgress;
  bool aborted = false;
  std::deque<OperationPtr> pending;
  std::thread thread;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, int> listeners;  ///< by unique id, until somebody forms as rank 0
  std::map<int, int> faults;             ///< by rank
  std::set<FakeComm*> comms;
  FakeEvents<Operation> events;
  uint64_t ids = 0;
  int version = 22809;
  int hanging = 0;
  /// Events are those of the fake GPUs, which know nothing of what is enqueued here: so the
  /// communicator is not ready before it has moved.
  bool events_elsewhere = false;

  int FaultOf(int rank) const {
    const auto fault = faults.find(rank);
    return fault == faults.end() ? 0 : fault->second;
  }
};
World& TheWorld() {
  static auto* world = new World();  // threads may be left behind
  static const bool read = [] {
    if (const char* version = std::getenv("FAKE_NCCL_VERSION")) world->version = std::stoi(version);
    world->events_elsewhere = std::getenv("FAKE_NCCL_EVENTS_ELSEWHERE") != nullptr;
    if (const char* fault = std::getenv("FAKE_NCCL_FAULT")) {
      world->faults[0] = world->faults[1] = std::stoi(fault);
    }
    return true;
  }();
  static_cast<void>(read);
  return *world;
}

FakeComm* As(nccl::Comm comm) { return reinterpret_cast<FakeComm*>(comm); }

/// A call of the fake GPUs, which somebody else has loaded.
template <typename Function>
Function* Cuda(const char* name) {
  void* library = dlopen("libfake_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}
int CurrentDevice() {
  static auto* call = Cuda<decltype(fake_cuda_current_device)>("fake_cuda_current_device");
  return call == nullptr ? 0 : call();
}
/// Null: it is no memory of `device`.
std::byte* Reach(void* data, size_t bytes, int device) {
  static auto* index = Cuda<decltype(fake_cuda_index_of)>("fake_cuda_index_of");
  static auto* alias = Cuda<decltype(fake_cuda_alias)>("fake_cuda_alias");
  if (index == nullptr || alias == nullptr || index(data) != device) return nullptr;
  return static_cast<std::byte*>(alias(data, bytes));
}

bool WriteAll(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t some = send(fd, at, bytes, MSG_NOSIGNAL);
    if (some <= 0) return false;
    at += some;
    bytes -= static_cast<size_t>(some);
  }
  return true;
}

bool ReadAll(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t some = recv(fd, at, bytes, 0);
    if (some <= 0) return false;
    at += some;
    bytes -= static_cast<size_t>(some);
  }
  return true;
}

/// The other rank of `comm`, or -1.
int Meet(FakeComm& comm) {
  if (comm.rank == 0) {
    const int met = accept(comm.listener, nullptr, nullptr);
    return met;
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&comm.peer), sizeof(comm.peer)) == 0) return fd;
  close(fd);
  return -1;
}

/// False: the peer is gone, or of another mind.
bool Move(FakeComm& comm, Operation& operation) {
  uint64_t bytes = operation.bytes;
  if (operation.send) {
    return WriteAll(comm.socket, &bytes, sizeof(bytes)) &&
           WriteAll(comm.socket, operation.data, operation.bytes);
  }
  std::vector<std::byte> came(operation.bytes);
  if (!ReadAll(comm.socket, &bytes, sizeof(bytes)) || bytes != operation.bytes ||
      !ReadAll(comm.socket, came.data(), came.size())) {
    return false;
  }
  std::lock_guard lock(TheWorld().mutex);
  if (comm.aborted) return false;
  if (TheWorld().FaultOf(comm.rank) == FAKE_NCCL_WRONG_BYTES) came.back() ^= std::byte{1};
  std::memcpy(operation.data, came.data(), came.size());
  return true;
}

void Run(FakeComm* comm) {
  World& world = TheWorld();
  const int met = Meet(*comm);
  std::unique_lock lock(world.mutex);
  if (met < 0) {
    if (!comm->aborted) comm->state = nccl::kSystemError;
    return;
  }
  comm->socket = met;
  world.changed.wait(
      lock, [&] { return comm->aborted || world.FaultOf(comm->rank) != FAKE_NCCL_HANG_INIT; });
  // Ready when both are.
  if (comm->aborted) return;
  lock.unlock();
  char here = 1;
  const bool both = WriteAll(met, &here, 1) && ReadAll(met, &here, 1);
  lock.lock();
  if (comm->aborted) return;
  comm->state = both ? nccl::kSuccess : nccl::kRemoteError;
  while (both) {
    world.changed.wait(lock, [&] {
      return comm->aborted ||
             (!comm->pending.empty() && world.FaultOf(comm->rank) != FAKE_NCCL_HANG_OPERATION);
    });
    if (comm->aborted) return;
    const OperationPtr next = comm->pending.front();
    lock.unlock();
    const bool moved = Move(*comm, *next);
    lock.lock();
    if (comm->aborted) return;
    if (!moved) {
      comm->state = nccl::kRemoteError;
      return;
    }
    next->over = true;
    comm->pending.pop_front();
    if (world.events_elsewhere && comm->pending.empty()) comm->state = nccl::kSuccess;
  }
}

int Enqueue(FakeComm& comm, const OperationPtr& operation, void* stream) {
  World& world = TheWorld();
  if (world.FaultOf(comm.rank) == FAKE_NCCL_ASYNC_ERROR) comm.state = nccl::kSystemError;
  if (world.events_elsewhere && comm.state == nccl::kSuccess) comm.state = nccl::kInProgress;
  comm.pending.push_back(operation);
  world.events.Enqueue(stream, operation);
  world.changed.notify_all();
  return nccl::kInProgress;
}

int Add(nccl::Comm comm, bool send, void* data, size_t bytes, int type, int peer, void* stream) {
  FakeComm& on = *As(comm);
  std::byte* at = Reach(data, bytes, on.device);
  if (type != nccl::kUint8 || peer != 1 - on.rank || at == nullptr ||
      CurrentDevice() != on.device) {
    return nccl::kInvalidArgument;
  }
  auto operation = std::make_shared<Operation>(Operation{send, at, bytes});
  std::lock_guard lock(TheWorld().mutex);
  return Enqueue(on, operation, stream);
}

void Shut(FakeComm& comm) {
  if (comm.socket >= 0) shutdown(comm.socket, SHUT_RDWR);
  if (comm.listener >= 0) shutdown(comm.listener, SHUT_RDWR);
}

int Leave(nccl::Comm comm) {
  World& world = TheWorld();
  FakeComm* gone = As(comm);
  {
    std::unique_lock lock(world.mutex);
    gone->aborted = true;
    Shut(*gone);
    world.changed.notify_all();
    if (world.FaultOf(gone->rank) == FAKE_NCCL_HANG_ABORT) {
      ++world.hanging;
      world.changed.wait(lock, [&] { return world.FaultOf(gone->rank) != FAKE_NCCL_HANG_ABORT; });
      // What NCCL has not let go of it may still write to.
      for (const OperationPtr& operation : gone->pending) {
        if (!operation->send) std::memset(operation->data, 0xee, operation->bytes);
      }
      --world.hanging;
      world.changed.notify_all();
    }
  }
  gone->thread.join();
  std::lock_guard lock(world.mutex);
  for (const OperationPtr& operation : gone->pending) operation->over = true;
  for (const int fd : {gone->socket, gone->listener}) {
    if (fd >= 0) close(fd);
  }
  world.comms.erase(gone);
  delete gone;
  return nccl::kSuccess;
}

}  // namespace

extern "C" {

void fake_nccl_fault(int rank, int fault) {
  std::lock_guard lock(TheWorld().mutex);
  TheWorld().faults[rank] = fault;
}

void fake_nccl_lose(int rank) {
  std::lock_guard lock(TheWorld().mutex);
  for (FakeComm* comm : TheWorld().comms) {
    if (comm->rank == rank) Shut(*comm);
  }
}

void fake_nccl_reset(void) {
  World& world = TheWorld();
  std::unique_lock lock(world.mutex);
  world.faults.clear();
  world.version = 22809;
  world.changed.notify_all();
  world.changed.wait(lock, [&] { return world.hanging == 0; });
}

void fake_nccl_set_version(int version) {
  std::lock_guard lock(TheWorld().mutex);
  TheWorld().version = version;
}

int fake_nccl_live_comms(void) {
  std::lock_guard lock(TheWorld().mutex);
  return static_cast<int>(TheWorld().comms.size());
}

int fake_nccl_pending(void) {
  std::lock_guard lock(TheWorld().mutex);
  size_t bytes = 0;
  for (const FakeComm* comm : TheWorld().comms) {
    for (const OperationPtr& operation : comm->pending) bytes += operation->bytes;
  }
  return static_cast<int>(bytes);
}

// ---- NCCL ----
int ncclGetVersion(int* version) {
  std::lock_guard lock(TheWorld().mutex);
  *version = TheWorld().version;
  return nccl::kSuccess;
}

int ncclGetUniqueId(nccl::UniqueId* id) {
  World& world = TheWorld();
  std::lock_guard lock(world.mutex);
  *id = {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name =
      "fake-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++world.ids);
  std::memcpy(id->bytes, name.data(), name.size());
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(fd, 1) != 0) {
    close(fd);
    return nccl::kSystemError;
  }
  world.listeners[name] = fd;
  return nccl::kSuccess;
}

int ncclCommInitRankConfig(nccl::Comm* comm, int size, nccl::UniqueId id, int rank,
                           nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0 || size != 2) {
    return nccl::kInvalidArgument;
  }
  World& world = TheWorld();
  std::lock_guard lock(world.mutex);
  const std::string name(id.bytes, strnlen(id.bytes, sizeof(id.bytes)));
  auto* made = new FakeComm();
  made->rank = rank;
  made->device = CurrentDevice();
  if (rank == 0) {
    const auto found = world.listeners.find(name);
    if (found == world.listeners.end()) {
      delete made;
      return nccl::kInvalidArgument;
    }
    made->listener = found->second;
    world.listeners.erase(found);
  } else {
    made->peer.sun_family = AF_UNIX;
    std::memcpy(made->peer.sun_path + 1, name.data(), std::min<size_t>(name.size(), 100));
  }
  world.comms.insert(made);
  made->thread = std::thread(Run, made);
  *comm = reinterpret_cast<nccl::Comm>(made);
  return nccl::kInProgress;
}

int ncclCommGetAsyncError(nccl::Comm comm, int* error) {
  std::lock_guard lock(TheWorld().mutex);
  *error = As(comm)->state;
  return nccl::kSuccess;
}

int ncclCommFinalize(nccl::Comm) { return nccl::kInProgress; }
int ncclCommDestroy(nccl::Comm comm) { return Leave(comm); }
int ncclCommAbort(nccl::Comm comm) { return Leave(comm); }

int ncclBroadcast(const void*, void*, size_t, int, int, nccl::Comm, void*) {
  return nccl::kInvalidUsage;
}
int ncclSend(const void* data, size_t count, int type, int peer, nccl::Comm comm, void* stream) {
  return Add(comm, true, const_cast<void*>(data), count, type, peer, stream);
}
int ncclRecv(void* data, size_t count, int type, int peer, nccl::Comm comm, void* stream) {
  return Add(comm, false, data, count, type, peer, stream);
}
int ncclGroupStart() { return nccl::kSuccess; }
int ncclGroupEnd() { return nccl::kInProgress; }

FAKE_NCCL_REST(TheWorld)

}  // extern "C"
