// NCCL and the events of libweightwire_cuda.so for threads of one process and host memory: bytes
// move when all sides of an operation have been enqueued, under one lock, so that a communicator
// that was aborted is never touched again. Nothing here blocks but what a fault asks for.
#include "tests/support/fake_nccl/fake_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/collective/nccl_abi.h"
#include "tests/support/fake_nccl/fake_events.h"

namespace {

using namespace weightwire::collective;

enum class Kind { kBroadcast, kSend, kReceive };

struct Operation {
  Kind kind;
  void* data;
  size_t bytes;
  int peer;  ///< or root
  void* stream;
  bool over = false;  ///< moved, or given up
};
using OperationPtr = std::shared_ptr<Operation>;

struct Room;
struct FakeComm {
  Room* room;
  int rank;
  int state = nccl::kInProgress;
  std::deque<OperationPtr> pending;
};

/// The communicators of one unique id.
struct Room {
  int size = 0;  ///< as the first one said
  std::map<int, FakeComm*> members;
  bool spent = false;  ///< was complete, or lost a member
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Room> rooms;  ///< by unique id
  std::map<int, int> faults;          ///< by rank
  std::set<FakeComm*> comms;
  FakeEvents<Operation> events;
  uint64_t ids = 0;
  int version = 22809;
  int hanging = 0;

  int FaultOf(int rank) const {
    const auto fault = faults.find(rank);
    return fault == faults.end() ? 0 : fault->second;
  }
};
World world;
World& TheWorld() { return world; }
thread_local int group_depth = 0;
thread_local std::vector<std::pair<FakeComm*, OperationPtr>> group;

FakeComm* As(nccl::Comm comm) { return reinterpret_cast<FakeComm*>(comm); }

void GiveUp(FakeComm& comm) {
  for (const OperationPtr& operation : comm.pending) operation->over = true;
  comm.pending.clear();
}

void FailRoom(Room& room, int why) {
  for (auto& [rank, member] : room.members) member->state = why;
}

bool Moves(const FakeComm& comm) {
  return comm.state == nccl::kSuccess && world.FaultOf(comm.rank) != FAKE_NCCL_HANG_OPERATION;
}

/// One broadcast, when it is the next operation of everybody.
bool MoveBroadcast(Room& room) {
  if (static_cast<int>(room.members.size()) < room.size) return false;
  const Operation* root = nullptr;
  for (auto& [rank, member] : room.members) {
    if (!Moves(*member) || member->pending.empty()) return false;
    const Operation& next = *member->pending.front();
    if (next.kind != Kind::kBroadcast) return false;
    if (rank == next.peer) root = &next;
  }
  for (auto& [rank, member] : room.members) {
    const Operation& next = *member->pending.front();
    if (root == nullptr || next.bytes != root->bytes || next.peer != root->peer) {
      FailRoom(room, nccl::kInvalidUsage);
      return false;
    }
  }
  for (auto& [rank, member] : room.members) {
    Operation& next = *member->pending.front();
    if (&next != root) std::memcpy(next.data, root->data, root->bytes);
    next.over = true;
  }
  for (auto& [rank, member] : room.members) member->pending.pop_front();
  return true;
}

std::deque<OperationPtr>::iterator FindFirst(FakeComm& comm, Kind kind, int peer) {
  return std::ranges::find_if(comm.pending, [&](const OperationPtr& operation) {
    return operation->kind == kind && operation->peer == peer;
  });
}

bool MovePair(Room& room) {
  for (auto& [rank, sender] : room.members) {
    for (auto& [peer, receiver] : room.members) {
      if (!Moves(*sender) || !Moves(*receiver)) continue;
      const auto send = FindFirst(*sender, Kind::kSend, peer);
      const auto receive = FindFirst(*receiver, Kind::kReceive, rank);
      if (send == sender->pending.end() || receive == receiver->pending.end()) continue;
      if ((*send)->bytes != (*receive)->bytes) {
        sender->state = receiver->state = nccl::kInvalidUsage;
        continue;
      }
      std::memcpy((*receive)->data, (*send)->data, (*send)->bytes);
      (*send)->over = (*receive)->over = true;
      sender->pending.erase(send);
      receiver->pending.erase(receive);
      return true;
    }
  }
  return false;
}

int Enqueue(FakeComm& comm, const OperationPtr& operation) {
  if (world.FaultOf(comm.rank) == FAKE_NCCL_ASYNC_ERROR) comm.state = nccl::kSystemError;
  comm.pending.push_back(operation);
  world.events.Enqueue(operation->stream, operation);
  while (MoveBroadcast(*comm.room) || MovePair(*comm.room)) {
  }
  return nccl::kInProgress;
}

int Add(nccl::Comm comm, Operation operation) {
  auto shared = std::make_shared<Operation>(operation);
  if (group_depth > 0) {
    group.emplace_back(As(comm), shared);
    return nccl::kSuccess;
  }
  std::lock_guard lock(world.mutex);
  return Enqueue(*As(comm), shared);
}

void EnterRoom(FakeComm& comm, const std::string& id, int size) {
  const auto found = world.rooms.find(id);
  if (found == world.rooms.end()) {
    comm.room = &world.rooms["nowhere"];
    comm.state = nccl::kSystemError;
    return;
  }
  Room& room = found->second;
  comm.room = &room;
  if (room.spent || room.members.contains(comm.rank) || (room.size != 0 && room.size != size)) {
    if (!room.spent) FailRoom(room, nccl::kInvalidUsage);
    comm.state = nccl::kInvalidUsage;
    return;
  }
  room.size = size;
  room.members[comm.rank] = &comm;
  if (static_cast<int>(room.members.size()) < size) return;
  room.spent = true;
  const bool hangs = std::ranges::any_of(room.members, [](const auto& entry) {
    return world.FaultOf(entry.first) == FAKE_NCCL_HANG_INIT;
  });
  if (!hangs) FailRoom(room, nccl::kSuccess);
}

int LeaveRoom(nccl::Comm comm) {
  std::unique_lock lock(world.mutex);
  FakeComm* gone = As(comm);
  ++world.hanging;
  world.changed.wait(lock, [&] { return world.FaultOf(gone->rank) != FAKE_NCCL_HANG_ABORT; });
  --world.hanging;
  world.changed.notify_all();
  GiveUp(*gone);
  if (auto member = gone->room->members.find(gone->rank);
      member != gone->room->members.end() && member->second == gone) {
    gone->room->members.erase(member);
    gone->room->spent = true;
  }
  world.comms.erase(gone);
  delete gone;
  return nccl::kSuccess;
}

}  // namespace

extern "C" {

void fake_nccl_fault(int rank, int fault) {
  std::lock_guard lock(world.mutex);
  world.faults[rank] = fault;
}

void fake_nccl_lose(int rank) {
  std::lock_guard lock(world.mutex);
  for (FakeComm* comm : world.comms) {
    if (comm->rank != rank) continue;
    GiveUp(*comm);
    FailRoom(*comm->room, nccl::kRemoteError);
  }
}

void fake_nccl_reset(void) {
  std::unique_lock lock(world.mutex);
  world.faults.clear();
  world.version = 22809;
  world.changed.notify_all();
  world.changed.wait(lock, [] { return world.hanging == 0; });
  if (!world.comms.empty()) return;
  world.rooms.clear();
  world.events.ForgetStreams();
}

void fake_nccl_set_version(int version) {
  std::lock_guard lock(world.mutex);
  world.version = version;
}

int fake_nccl_live_comms(void) {
  std::lock_guard lock(world.mutex);
  return static_cast<int>(world.comms.size());
}

int fake_nccl_pending(void) {
  std::lock_guard lock(world.mutex);
  size_t bytes = 0;
  for (const FakeComm* comm : world.comms) {
    for (const OperationPtr& operation : comm->pending) bytes += operation->bytes;
  }
  return static_cast<int>(bytes);
}

// ---- NCCL ----
int ncclGetVersion(int* version) {
  std::lock_guard lock(world.mutex);
  *version = world.version;
  return nccl::kSuccess;
}

int ncclGetUniqueId(nccl::UniqueId* id) {
  std::lock_guard lock(world.mutex);
  *id = {};
  const std::string name = "fake id " + std::to_string(++world.ids);
  std::memcpy(id->bytes, name.data(), name.size());
  world.rooms[std::string(id->bytes, sizeof(id->bytes))];
  return nccl::kSuccess;
}

int ncclCommInitRankConfig(nccl::Comm* comm, int size, nccl::UniqueId id, int rank,
                           nccl::Config* config) {
  if (config->magic != 0xcafebeef || config->blocking != 0) return nccl::kInvalidArgument;
  std::lock_guard lock(world.mutex);
  auto* made = new FakeComm{nullptr, rank, nccl::kInProgress, {}};
  world.comms.insert(made);
  EnterRoom(*made, std::string(id.bytes, sizeof(id.bytes)), size);
  *comm = reinterpret_cast<nccl::Comm>(made);
  return nccl::kInProgress;
}

int ncclCommGetAsyncError(nccl::Comm comm, int* error) {
  std::lock_guard lock(world.mutex);
  *error = As(comm)->state;
  return nccl::kSuccess;
}

int ncclCommFinalize(nccl::Comm comm) {
  std::lock_guard lock(world.mutex);
  if (world.FaultOf(As(comm)->rank) == FAKE_NCCL_HANG_FLUSH) As(comm)->state = nccl::kInProgress;
  return nccl::kInProgress;
}

int ncclCommDestroy(nccl::Comm comm) { return LeaveRoom(comm); }
int ncclCommAbort(nccl::Comm comm) { return LeaveRoom(comm); }

int ncclBroadcast(const void*, void* data, size_t count, int type, int root, nccl::Comm comm,
                  void* stream) {
  if (type != nccl::kUint8) return nccl::kInvalidArgument;
  return Add(comm, {Kind::kBroadcast, data, count, root, stream});
}

int ncclSend(const void* data, size_t count, int type, int peer, nccl::Comm comm, void* stream) {
  if (type != nccl::kUint8) return nccl::kInvalidArgument;
  return Add(comm, {Kind::kSend, const_cast<void*>(data), count, peer, stream});
}

int ncclRecv(void* data, size_t count, int type, int peer, nccl::Comm comm, void* stream) {
  if (type != nccl::kUint8) return nccl::kInvalidArgument;
  return Add(comm, {Kind::kReceive, data, count, peer, stream});
}

int ncclGroupStart() {
  ++group_depth;
  return nccl::kSuccess;
}

int ncclGroupEnd() {
  if (--group_depth > 0) return nccl::kSuccess;
  std::lock_guard lock(world.mutex);
  for (auto& [comm, operation] : group) Enqueue(*comm, operation);
  group.clear();
  return nccl::kInProgress;
}

FAKE_NCCL_REST(TheWorld)

}  // extern "C"
