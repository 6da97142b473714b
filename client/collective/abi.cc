#include <cstring>
#include <exception>
#include <vector>

#include "client/collective/collective.h"
#include "client/collective/weightwire_nccl.h"

struct ww_nccl {
  std::unique_ptr<weightwire::collective::Collective> collective;
};

namespace weightwire::collective {
namespace {

static_assert(sizeof(nccl::UniqueId) == WW_NCCL_UNIQUE_ID_BYTES);
static_assert(static_cast<int>(State::kClosed) == WW_NCCL_CLOSED);
static_assert(static_cast<int>(State::kStuck) == WW_NCCL_STUCK);

thread_local Status last;

int32_t Keep(Status status) {
  last = std::move(status);
  return static_cast<int32_t>(last.code());
}

template <typename Work>
int32_t Guard(Work work) {
  try {
    return Keep(work());
  } catch (const std::exception& failure) {
    return Keep(Status(Code::kResourceExhausted, Reason::kLimitExceeded, failure.what()));
  }
}

Status Null(const char* what) {
  return Status(Code::kInvalidArgument, Reason::kInvalidRequest, std::string(what) + " is NULL");
}

Nanos Milliseconds(uint32_t count) { return std::chrono::milliseconds(count); }

std::vector<Piece> PiecesOf(const ww_nccl_piece* pieces, size_t count) {
  std::vector<Piece> out;
  for (size_t i = 0; i < count; ++i)
    out.push_back({pieces[i].data, pieces[i].bytes, pieces[i].peer});
  return out;
}

}  // namespace
}  // namespace weightwire::collective

using namespace weightwire::collective;  // the C names below have no namespace of their own

uint32_t ww_nccl_abi_version(void) { return WW_NCCL_ABI_VERSION; }

ww_nccl_status ww_nccl_last(void) {
  return {static_cast<int32_t>(last.code()), static_cast<int32_t>(last.reason()),
          last.message().c_str(), last.rank().c_str(), last.remedy().c_str()};
}

int32_t ww_nccl_open(const ww_nccl_options* options, ww_nccl** collective) {
  return Guard([&]() -> weightwire::Status {
    if (options == nullptr || collective == nullptr) return Null("an argument");
    Options out;
    if (options->nccl_library != nullptr) out.nccl_library = options->nccl_library;
    if (options->cuda_library != nullptr) out.cuda_library = options->cuda_library;
    out.device = options->device;
    if (options->release_grace_ms != 0) out.release_grace = Milliseconds(options->release_grace_ms);
    WW_ASSIGN_OR_STATUS(auto opened, Collective::Open(std::move(out)));
    *collective = new ww_nccl{std::move(opened)};
    return weightwire::OkStatus();
  });
}

void ww_nccl_free(ww_nccl* collective) { delete collective; }

int32_t ww_nccl_version(const ww_nccl* collective) {
  return collective->collective->nccl_version();
}

int32_t ww_nccl_unique_id(ww_nccl* collective, uint8_t id[WW_NCCL_UNIQUE_ID_BYTES]) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr || id == nullptr) return Null("an argument");
    WW_ASSIGN_OR_STATUS(const nccl::UniqueId made, collective->collective->MakeUniqueId());
    std::memcpy(id, made.bytes, sizeof(made.bytes));
    return weightwire::OkStatus();
  });
}

int32_t ww_nccl_form(ww_nccl* collective, const uint8_t id[WW_NCCL_UNIQUE_ID_BYTES], uint32_t rank,
                     uint32_t size, uint64_t epoch, uint32_t deadline_ms) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr || id == nullptr) return Null("an argument");
    nccl::UniqueId unique_id;
    std::memcpy(unique_id.bytes, id, sizeof(unique_id.bytes));
    return collective->collective->Form(unique_id, rank, size, epoch, Milliseconds(deadline_ms));
  });
}

int32_t ww_nccl_broadcast(ww_nccl* collective, void* data, size_t bytes, uint32_t root,
                          void* stream, uint32_t deadline_ms) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr) return Null("the collective");
    return collective->collective->Broadcast(data, bytes, root, stream, Milliseconds(deadline_ms));
  });
}

int32_t ww_nccl_exchange(ww_nccl* collective, const ww_nccl_piece* sends, size_t send_count,
                         const ww_nccl_piece* receives, size_t receive_count, void* stream,
                         uint32_t deadline_ms) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr || (sends == nullptr && send_count > 0) ||
        (receives == nullptr && receive_count > 0)) {
      return Null("an argument");
    }
    return collective->collective->Exchange(PiecesOf(sends, send_count),
                                            PiecesOf(receives, receive_count), stream,
                                            Milliseconds(deadline_ms));
  });
}

int32_t ww_nccl_abort(ww_nccl* collective, const char* why) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr) return Null("the collective");
    return collective->collective->Abort(why == nullptr ? "no reason given" : why);
  });
}

int32_t ww_nccl_close(ww_nccl* collective, uint32_t deadline_ms) {
  return Guard([&]() -> weightwire::Status {
    if (collective == nullptr) return Null("the collective");
    return collective->collective->Close(Milliseconds(deadline_ms));
  });
}

int32_t ww_nccl_state(const ww_nccl* collective) {
  return static_cast<int32_t>(collective->collective->state());
}

uint64_t ww_nccl_epoch(const ww_nccl* collective) { return collective->collective->epoch(); }
