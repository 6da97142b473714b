#include "server/rpc/trace.h"

#include <gtest/gtest.h>

namespace weightwire::rpc {
namespace {

constexpr std::string_view kHeader = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

TEST(Traceparent, GivesTheTraceId) {
  const auto trace = ParseTraceparent(kHeader);
  ASSERT_TRUE(trace);
  EXPECT_EQ(TraceHex(*trace), "0af7651916cd43dd8448eb211c80319c");
}

TEST(Traceparent, RefusesWhatIsMalformed) {
  for (std::string bad : {"", "00-", "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                          "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                          "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
                          "00-00000000000000000000000000000000-b7ad6b7169203331-01"}) {
    EXPECT_FALSE(ParseTraceparent(bad)) << bad;
  }
  for (size_t size = 0; size < kHeader.size(); ++size) {
    EXPECT_FALSE(ParseTraceparent(kHeader.substr(0, size)));
  }
}

}  // namespace
}  // namespace weightwire::rpc
