#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "client/collective/weightwire_nccl.h"
#include "server/base/clock.h"
#include "server/base/status.h"
#include "server/device/device.h"
#include "server/transport/nccl/nccl_messages.h"

namespace weightwire::transport {

struct NcclOptions;

/// libweightwire_nccl.so, loaded; never unloaded. Thread-safe.
class NcclLibrary {
 public:
  ///   kUnavailable / kTransportFailed  it, or NCCL, is not there; says which and where it looked
  static Result<std::shared_ptr<const NcclLibrary>> Load(const NcclOptions& options);

  struct Calls {
    decltype(&::ww_nccl_abi_version) abi_version = nullptr;
    decltype(&::ww_nccl_last) last = nullptr;
    decltype(&::ww_nccl_open) open = nullptr;
    decltype(&::ww_nccl_free) free = nullptr;
    decltype(&::ww_nccl_version) version = nullptr;
    decltype(&::ww_nccl_unique_id) unique_id = nullptr;
    decltype(&::ww_nccl_form) form = nullptr;
    decltype(&::ww_nccl_exchange) exchange = nullptr;
    decltype(&::ww_nccl_abort) abort = nullptr;
    decltype(&::ww_nccl_state) state = nullptr;
  };
  const Calls& calls() const { return calls_; }
  /// OK, or what the call of this thread that gave `code` has left in words.
  Status Checked(int32_t code) const;
  /// Of NCCL, as it counts: 22809 is 2.28.9.
  int32_t nccl_version() const { return nccl_version_; }
  /// Closed with ww_nccl_free by the caller.
  Result<ww_nccl*> Open(int32_t device) const;

 private:
  NcclLibrary() = default;
  Calls calls_;
  std::string nccl_library_;
  std::string cuda_library_;
  uint32_t release_grace_ms_ = 0;
  int32_t nccl_version_ = 0;
};

/// A communicator of two, between `device` and a GPU of the peer. Calls block, with a deadline, and
/// are of one thread, whose current GPU `device` is; but for Abort.
class NcclPair {
 public:
  static Result<std::unique_ptr<NcclPair>> Open(std::shared_ptr<const NcclLibrary> library,
                                                device::Device& device);
  /// Takes the communicator apart where that is still to be done: may block for release_grace.
  ~NcclPair();
  NcclPair(const NcclPair&) = delete;
  NcclPair& operator=(const NcclPair&) = delete;

  Result<std::array<uint8_t, 128>> MakeUniqueId();
  /// As rank 0, who made the id, or 1.
  Status Form(const std::array<uint8_t, 128>& unique_id, uint32_t rank, Nanos timeout);
  Status Send(std::byte* data, size_t bytes, Nanos timeout);
  Status Receive(std::byte* data, size_t bytes, Nanos timeout);
  /// On any thread: what runs fails. May block for release_grace.
  void Abort(const std::string& why);
  /// NCCL has not let go: memory that it was given must stay.
  bool stuck() const;

 private:
  NcclPair(std::shared_ptr<const NcclLibrary> library, ww_nccl* pair, std::shared_ptr<void> stream)
      : library_(std::move(library)), pair_(pair), stream_(std::move(stream)) {}

  const std::shared_ptr<const NcclLibrary> library_;
  ww_nccl* const pair_;
  const std::shared_ptr<void> stream_;
  uint32_t peer_ = 0;
};

}  // namespace weightwire::transport
