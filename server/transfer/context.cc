#include "server/transfer/context.h"

namespace weightwire::transfer {

transport::Transport* Context::TransportOf(const std::string& name) const {
  auto entry = transports.find(name);
  return entry == transports.end() ? nullptr : entry->second;
}

std::shared_ptr<SourceSums> Context::SumsAtReader(const StreamKey& stream) const {
  auto entry = sums_at_reader.find(stream);
  return entry == sums_at_reader.end() ? nullptr : entry->second.lock();
}

}  // namespace weightwire::transfer
