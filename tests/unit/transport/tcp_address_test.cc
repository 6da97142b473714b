#include "server/transport/address.h"

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

TEST(TcpAddress, SplitsAndJoins) {
  struct Case {
    std::string text;
    std::string host;
    uint16_t port;
  };
  for (const Case& one :
       {Case{"127.0.0.1:0", "127.0.0.1", 0}, Case{"node-7.pods:65535", "node-7.pods", 65535},
        Case{"[::1]:80", "::1", 80}}) {
    auto parts = SplitAddress(one.text);
    ASSERT_TRUE(parts.has_value()) << one.text;
    EXPECT_EQ(parts->first, one.host);
    EXPECT_EQ(parts->second, one.port);
    EXPECT_EQ(JoinAddress(one.host, one.port), one.text);
  }
}

TEST(TcpAddress, RefusesWhatHasNoHostOrPort) {
  for (const char* text : {"", ":", "host", "host:", ":80", "host:65536", "host:-1", "host:8o",
                           "host: 80", "host:80 "}) {
    auto parts = SplitAddress(text);
    ASSERT_FALSE(parts.has_value()) << text;
    EXPECT_EQ(parts.error().reason(), Reason::kConfigInvalid);
  }
}

}  // namespace
}  // namespace weightwire::transport
