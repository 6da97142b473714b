#include <filesystem>

#include "gtest/gtest.h"
#include "server/transport/tcp/tcp_transport.h"
#include "tests/support/accepting_handler.h"
#include "tests/support/to_itself.h"

// How many sockets a session opens with a peer on this host.
namespace weightwire::transport {
namespace {

size_t OpenSockets() {
  size_t sockets = 0;
  for (const auto& fd : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto what = std::filesystem::read_symlink(fd.path(), gone).string();
    sockets += what.starts_with("socket:");
  }
  return sockets;
}

// Both ends of every connection are ours.
size_t Opened(int connections, int near_connections) {
  TcpOptions options;
  options.connections = connections;
  options.near_connections = near_connections;
  testing::AcceptingHandler handler;
  const auto transport = MakeTcpTransport(options);
  EXPECT_EQ(transport->Start(&handler, Incarnation(5)), OkStatus());
  const size_t before = OpenSockets();
  const auto endpoint = testing::ToItself(*transport);
  return (OpenSockets() - before) / 2;
}

TEST(NearConnections, AreAsManyAsAskedForAndNeverMoreThanFarOnes) {
  EXPECT_EQ(Opened(4, 4), 4u);
  EXPECT_EQ(Opened(4, 2), 2u);
  EXPECT_EQ(Opened(2, 3), 2u);
  EXPECT_EQ(Opened(2, 0), 1u);
}

}  // namespace
}  // namespace weightwire::transport
