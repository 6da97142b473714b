#include "server/transfer/context.h"

namespace weightwire::transfer {

transport::Transport* Context::TransportOf(const std::string& name) const {
  auto entry = transports.find(name);
  return entry == transports.end() ? nullptr : entry->second;
}

SegmentSums Context::SumsAtReader(const StreamKey& stream) const {
  auto entry = sums_at_reader.find(stream);
  if (entry == sums_at_reader.end()) return {};
  auto sums = entry->second.lock();
  if (sums == nullptr) return {};
  return [sums](uint32_t first, std::span<uint64_t> into) { return (*sums)(first, into); };
}

}  // namespace weightwire::transfer
