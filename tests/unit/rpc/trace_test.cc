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

TEST(Traceparent, OfATraceGivesItBack) {
  for (uint8_t last : {uint8_t{1}, uint8_t{0xab}}) {
    TraceId trace{};
    trace[15] = last;
    const auto back = ParseTraceparent(TraceparentOf(trace));
    ASSERT_TRUE(back);
    EXPECT_EQ(*back, trace);
    EXPECT_EQ(TraceparentOf(trace).find("-0000000000000000-"), std::string::npos)
        << "W3C refuses a parent id of zeros";
  }
}

}  // namespace
}  // namespace weightwire::rpc
