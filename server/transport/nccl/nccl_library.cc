#include "server/transport/nccl/nccl_library.h"

#include <dlfcn.h>

#include <algorithm>

#include "server/base/beside_program.h"
#include "server/transport/nccl/nccl_transport.h"

namespace weightwire::transport {
namespace {

constexpr char kFile[] = "libweightwire_nccl.so";
constexpr uint64_t kOnlyEpoch = 1;  // a pair forms once

Status Missing(const std::string& why) {
  return Status(Code::kUnavailable, Reason::kTransportFailed, "no NCCL: " + why)
      .Remedy("name the files with nccl_library, or leave nccl out of transports");
}

/// Rounded up: what did not end within that has not ended within `time`.
uint32_t Milliseconds(Nanos time) {
  const auto count = std::chrono::ceil<std::chrono::milliseconds>(time).count();
  return static_cast<uint32_t>(std::clamp<int64_t>(count, 1, 3'600'000));
}

}  // namespace

Result<std::shared_ptr<const NcclLibrary>> NcclLibrary::Load(const NcclOptions& options) {
  const std::string file = options.library.empty() ? BesideProgram(kFile) : options.library;
  void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return Fail(Missing(dlerror()));
  std::shared_ptr<NcclLibrary> library(new NcclLibrary());
  Calls& calls = library->calls_;
  std::string missing;
  const auto find = [&]<typename Function>(const char* name, Function*& into) {
    into = reinterpret_cast<Function*>(dlsym(handle, name));
    if (into == nullptr && missing.empty()) missing = name;
  };
  find("ww_nccl_abi_version", calls.abi_version);
  if (calls.abi_version == nullptr || calls.abi_version() != WW_NCCL_ABI_VERSION) {
    return Fail(Missing(file + " is of another build of weightwire"));
  }
  find("ww_nccl_last", calls.last);
  find("ww_nccl_open", calls.open);
  find("ww_nccl_free", calls.free);
  find("ww_nccl_version", calls.version);
  find("ww_nccl_unique_id", calls.unique_id);
  find("ww_nccl_form", calls.form);
  find("ww_nccl_exchange", calls.exchange);
  find("ww_nccl_abort", calls.abort);
  find("ww_nccl_state", calls.state);
  if (!missing.empty()) return Fail(Missing(file + " has no " + missing));
  library->nccl_library_ = options.nccl_library;
  library->cuda_library_ = options.cuda_library;
  library->release_grace_ms_ = Milliseconds(options.release_grace);
  // Whether NCCL is there shows when something is opened.
  const int32_t device = options.devices.empty() ? 0 : options.devices.begin()->second->index();
  auto probe = library->Open(device);
  if (!probe) return Fail(Missing(probe.error().message()));
  library->nccl_version_ = calls.version(*probe);
  calls.free(*probe);
  return library;
}

Status NcclLibrary::Checked(int32_t code) const {
  if (code == 0) return OkStatus();
  const ww_nccl_status last = calls_.last();
  return Status(static_cast<Code>(last.code), static_cast<Reason>(last.reason), last.message)
      .Remedy(last.remedy);
}

Result<ww_nccl*> NcclLibrary::Open(int32_t device) const {
  const auto named = [](const std::string& name) { return name.empty() ? nullptr : name.c_str(); };
  const ww_nccl_options options{named(nccl_library_), named(cuda_library_), device,
                                release_grace_ms_};
  ww_nccl* opened = nullptr;
  WW_FAIL_IF_ERROR(Checked(calls_.open(&options, &opened)));
  return opened;
}

Result<std::unique_ptr<NcclPair>> NcclPair::Open(std::shared_ptr<const NcclLibrary> library,
                                                 device::Device& device) {
  WW_FAIL_IF_ERROR(device.UseOnThisThread());
  WW_ASSIGN(auto stream, device.MakeStream());
  WW_ASSIGN(ww_nccl* const pair, library->Open(device.index()));
  return std::unique_ptr<NcclPair>(new NcclPair(std::move(library), pair, std::move(stream)));
}

NcclPair::~NcclPair() { library_->calls().free(pair_); }

Result<std::array<uint8_t, 128>> NcclPair::MakeUniqueId() {
  std::array<uint8_t, 128> id{};
  WW_FAIL_IF_ERROR(library_->Checked(library_->calls().unique_id(pair_, id.data())));
  return id;
}

Status NcclPair::Form(const std::array<uint8_t, 128>& unique_id, uint32_t rank, Nanos timeout) {
  peer_ = 1 - rank;
  return library_->Checked(
      library_->calls().form(pair_, unique_id.data(), rank, 2, kOnlyEpoch, Milliseconds(timeout)));
}

Status NcclPair::Send(std::byte* data, size_t bytes, Nanos timeout) {
  const ww_nccl_piece piece{data, bytes, peer_};
  return library_->Checked(library_->calls().exchange(pair_, &piece, 1, nullptr, 0, stream_.get(),
                                                      Milliseconds(timeout)));
}

Status NcclPair::Receive(std::byte* data, size_t bytes, Nanos timeout) {
  const ww_nccl_piece piece{data, bytes, peer_};
  return library_->Checked(library_->calls().exchange(pair_, nullptr, 0, &piece, 1, stream_.get(),
                                                      Milliseconds(timeout)));
}

void NcclPair::Abort(const std::string& why) {
  static_cast<void>(library_->calls().abort(pair_, why.c_str()));
}

bool NcclPair::stuck() const { return library_->calls().state(pair_) == WW_NCCL_STUCK; }

}  // namespace weightwire::transport
