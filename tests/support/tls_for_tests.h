#pragma once

#include <memory>

#include "server/transport/tcp/tcp_transport.h"

namespace weightwire::testing {

/// For a transport of this integrity: shows the certificate of tests/data/tls and believes
/// everybody whose is of that CA; null where no TLS is wanted.
std::shared_ptr<transport::TlsPeers> TlsPeersFor(transport::Integrity integrity);

}  // namespace weightwire::testing
