#include "server/transport/cuda_ipc/cuda_ipc_address.h"

#include <unistd.h>

#include <string_view>

#include "server/transport/address.h"

namespace weightwire::transport {

std::string FormatAddress(const CudaIpcAddress& address) {
  return JoinFacts(address.socket,
                   {{"pid", address.pid_namespace}, {"gpu", JoinGpus(address.gpus)}});
}

CudaIpcAddress ParseCudaIpcAddress(const std::string& text) {
  AddressFacts split = SplitFacts(text);
  return {split.address, split.facts["pid"], SplitGpus(split.facts["gpu"])};
}

std::string PidNamespace() {
  char target[64] = {};
  const ssize_t size = readlink("/proc/self/ns/pid", target, sizeof(target));
  const std::string_view text(target, size > 0 ? static_cast<size_t>(size) : 0);  // "pid:[…]"
  const size_t begin = text.find('[');
  const size_t end = text.find(']');
  if (begin == text.npos || end == text.npos) return {};
  return std::string(text.substr(begin + 1, end - begin - 1));
}

}  // namespace weightwire::transport
