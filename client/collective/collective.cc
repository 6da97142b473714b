#include "client/collective/collective.h"

#include <utility>

namespace weightwire::collective {
namespace {

/// Empty when nothing is wrong with it.
std::string FaultOf(const Piece& piece, uint32_t rank, uint32_t size) {
  if (piece.data == nullptr || piece.bytes == 0) return "it has no bytes";
  if (piece.peer >= size) return "there is no rank " + std::to_string(piece.peer);
  if (piece.peer == rank) return "it is for this rank itself; copy instead";
  return "";
}

}  // namespace

Result<std::unique_ptr<Collective>> Collective::Open(Options options) {
  WW_ASSIGN(Libraries libraries, LoadLibraries(options.nccl_library, options.cuda_library));
  return std::unique_ptr<Collective>(new Collective(std::move(options), libraries));
}

Collective::~Collective() { static_cast<void>(Abort("the collective is destroyed")); }

State Collective::state() const {
  std::lock_guard lock(mutex_);
  return state_.state();
}

uint64_t Collective::epoch() const {
  std::lock_guard lock(mutex_);
  return state_.epoch();
}

int32_t Collective::nccl_version() const {
  int version = 0;
  return nccl_.ncclGetVersion(&version) == nccl::kSuccess ? version : 0;
}

Result<nccl::UniqueId> Collective::MakeUniqueId() {
  nccl::UniqueId id{};
  const int result = nccl_.ncclGetUniqueId(&id);
  if (result != nccl::kSuccess) {
    return Fail(Status(Code::kUnavailable, Reason::kTransportFailed,
                       std::string("ncclGetUniqueId: ") + nccl_.ncclGetErrorString(result))
                    .Remedy("is there a network interface for NCCL_SOCKET_IFNAME?"));
  }
  return id;
}

Status Collective::Form(const nccl::UniqueId& id, uint32_t rank, uint32_t size, uint64_t epoch,
                        Nanos deadline) {
  const auto end = Clock::now() + deadline;
  if (rank >= size) {
    return Status(
        Code::kInvalidArgument, Reason::kInvalidRequest,
        "rank " + std::to_string(rank) + " does not fit a size of " + std::to_string(size));
  }
  {
    std::lock_guard lock(mutex_);
    WW_RETURN_IF_ERROR(state_.BeginForm(epoch));
  }
  return Settle(StartForm(id, rank, size, end));
}

Status Collective::StartForm(const nccl::UniqueId& id, uint32_t rank, uint32_t size,
                             Clock::time_point end) {
  rank_ = rank;
  size_ = size;
  if (events_.ww_cuda_event_create(options_.device, &event_) != WW_CUDA_OK) {
    event_ = nullptr;
    return EventFailed("making an event");
  }
  nccl::Config config;
  static constexpr char kWhat[] = "forming";
  WW_RETURN_IF_ERROR(
      Enqueued(kWhat, nccl_.ncclCommInitRankConfig(&comm_, static_cast<int>(size), id,
                                                   static_cast<int>(rank), &config)));
  return Poll(kWhat, end, [this] { return CommReady(kWhat); });
}

Status Collective::Broadcast(void* data, size_t bytes, uint32_t root, void* stream,
                             Nanos deadline) {
  const auto end = Clock::now() + deadline;
  WW_RETURN_IF_ERROR(Begin());
  if (data == nullptr || bytes == 0) return Refuse("broadcast: it has no bytes");
  if (root >= size_) return Refuse("broadcast: there is no rank " + std::to_string(root));
  return Settle(Drive("broadcast", stream, end, [&, this] {
    return nccl_.ncclBroadcast(data, data, bytes, nccl::kUint8, static_cast<int>(root), comm_,
                               stream);
  }));
}

Status Collective::Exchange(std::span<const Piece> sends, std::span<const Piece> receives,
                            void* stream, Nanos deadline) {
  const auto end = Clock::now() + deadline;
  WW_RETURN_IF_ERROR(Begin());
  for (const auto& [pieces, what] : {std::pair(sends, "send"), std::pair(receives, "receive")}) {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const std::string why = FaultOf(pieces[i], rank_, size_);
      if (!why.empty()) return Refuse(std::string(what) + " " + std::to_string(i) + ": " + why);
    }
  }
  return Settle(Drive("exchange", stream, end, [&, this] {
    int result = nccl_.ncclGroupStart();
    const auto add = [&](int next) {
      if (result == nccl::kSuccess && next != nccl::kInProgress) result = next;
    };
    for (const Piece& s : sends) {
      add(nccl_.ncclSend(s.data, s.bytes, nccl::kUint8, static_cast<int>(s.peer), comm_, stream));
    }
    for (const Piece& r : receives) {
      add(nccl_.ncclRecv(r.data, r.bytes, nccl::kUint8, static_cast<int>(r.peer), comm_, stream));
    }
    add(nccl_.ncclGroupEnd());
    return result;
  }));
}

Status Collective::Begin() {
  std::lock_guard lock(mutex_);
  return state_.BeginOperation();
}

Status Collective::Refuse(std::string why) {
  Status refused = At(Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::move(why)));
  {
    std::lock_guard lock(mutex_);
    if (state_.Done()) return refused;
  }
  return Settle(std::move(refused));
}

Status Collective::Abort(const std::string& why) {
  std::unique_lock lock(mutex_);
  const bool mine = state_.state() == State::kReady;
  if (!state_.Fail(Status(Code::kAborted, Reason::kAbortRequested, "aborted: " + why))) {
    return OkStatus();
  }
  changed_.notify_all();
  lock.unlock();
  if (!mine) return OkStatus();
  Release(nccl_.ncclCommAbort);
  return state() == State::kStuck ? Stuck("") : OkStatus();
}

Status Collective::Close(Nanos deadline) {
  const auto end = Clock::now() + deadline;
  {
    std::lock_guard lock(mutex_);
    if (state_.Close()) return OkStatus();
  }
  WW_RETURN_IF_ERROR(Begin());
  static constexpr char kWhat[] = "closing";
  Status status = Enqueued(kWhat, nccl_.ncclCommFinalize(comm_));
  if (status.ok()) status = Poll(kWhat, end, [this] { return CommReady(kWhat); });
  if (!status.ok()) {
    status = Settle(std::move(status));
  } else {
    {
      std::lock_guard lock(mutex_);
      state_.Fail(Status(Code::kAborted, Reason::kAbortRequested, "closed"));
    }
    Release(nccl_.ncclCommDestroy);
    if (state() == State::kStuck) status = Stuck("");
  }
  std::lock_guard lock(mutex_);
  state_.Close();
  return status;
}

}  // namespace weightwire::collective
