#include "server/transport/shm/shm_transport.h"

#include <utility>

namespace weightwire::transport {

std::unique_ptr<Transport> MakeShmTransport(ShmOptions options) {
  return std::make_unique<LocalTransport>("shm", std::move(options), nullptr);
}

}  // namespace weightwire::transport
