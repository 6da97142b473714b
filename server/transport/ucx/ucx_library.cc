#include "server/transport/ucx/ucx_library.h"

#include <dlfcn.h>

#include <string>

#include "server/base/beside_program.h"

namespace weightwire::transport {
namespace {

constexpr char kFile[] = "libweightwire_ucx.so";

Status Missing(const std::string& why) {
  return Status(Code::kUnavailable, Reason::kTransportFailed, "no UCX: " + why)
      .Remedy("install libucx0 and build with libucx-dev, or leave ucx out of `transports`");
}

Result<MakeUcxWorkerFn> Load() {
  // Never closed: UCX leaves threads and hooks behind.
  void* library = dlopen(BesideProgram(kFile).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Fail(Missing(dlerror()));
  const auto abi = reinterpret_cast<UcxPluginAbi>(dlsym(library, kUcxPluginAbiSymbol));
  const auto make = reinterpret_cast<MakeUcxWorkerFn>(dlsym(library, kMakeUcxWorkerSymbol));
  if (abi == nullptr || make == nullptr || abi() != kUcxPluginAbi) {
    return Fail(Missing(std::string(kFile) + " is of another build of weightwire"));
  }
  return make;
}

}  // namespace

Result<std::unique_ptr<UcxWorker>> MakeUcxWorker(const UcxWorkerOptions& options) {
  static const Result<MakeUcxWorkerFn> make = Load();
  if (!make.has_value()) return Fail(make.error());
  std::string failure;
  std::unique_ptr<UcxWorker> worker((*make)(options, failure));
  if (worker == nullptr) return Fail(Missing(failure));
  return worker;
}

}  // namespace weightwire::transport
