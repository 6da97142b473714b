#include "server/transfer/context.h"

namespace weightwire::transfer {

transport::Transport* Context::TransportOf(const std::string& name) const {
  auto entry = transports.find(name);
  return entry == transports.end() ? nullptr : entry->second;
}

}  // namespace weightwire::transfer
