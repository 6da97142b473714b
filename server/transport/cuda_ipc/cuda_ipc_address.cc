#include "server/transport/cuda_ipc/cuda_ipc_address.h"

#include <unistd.h>

#include <string_view>

namespace weightwire::transport {
namespace {

constexpr size_t kGpusMax = 15;

/// `visit` gets each part of `text` between separators.
template <typename Visit>
void Split(std::string_view text, char separator, Visit&& visit) {
  while (!text.empty()) {
    const size_t end = text.find(separator);
    visit(text.substr(0, end));
    text = end == text.npos ? std::string_view() : text.substr(end + 1);
  }
}

}  // namespace

std::string FormatAddress(const CudaIpcAddress& address) {
  std::string text = address.socket;
  char separator = '?';
  if (!address.pid_namespace.empty()) {
    text += "?pid=" + address.pid_namespace;
    separator = '&';
  }
  for (size_t i = 0; i < address.gpus.size() && i < kGpusMax; ++i) {
    text += i == 0 ? separator + std::string("gpu=") : std::string(",");
    text += address.gpus[i];
  }
  return text;
}

CudaIpcAddress ParseCudaIpcAddress(const std::string& text) {
  CudaIpcAddress address;
  const size_t end = text.find('?');
  address.socket = text.substr(0, end);
  if (end == text.npos) return address;
  Split(std::string_view(text).substr(end + 1), '&', [&](std::string_view fact) {
    if (fact.starts_with("pid=")) address.pid_namespace = fact.substr(4);
    if (!fact.starts_with("gpu=")) return;
    Split(fact.substr(4), ',', [&](std::string_view gpu) { address.gpus.emplace_back(gpu); });
  });
  return address;
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
