#include "server/wire/checks.h"

#include <gtest/gtest.h>

#include "server/wire/limits.h"

namespace weightwire::wire {
namespace {

TEST(CleanText, KeepsWhatFits) {
  EXPECT_EQ(CleanText("größer ≤ 漢字 😀", 100), "größer ≤ 漢字 😀");
  EXPECT_EQ(CleanText("", 10), "");
  EXPECT_EQ(CleanText("0123456789", 10), "0123456789");
}

TEST(CleanText, CutsBetweenCharacters) {
  const std::string cut = CleanText("aaaaßßßß", 9);
  EXPECT_LE(cut.size(), 9u);
  EXPECT_EQ(cut, "aaaaß…");
  EXPECT_EQ(CleanText("0123456789x", 10), "0123456…");
  EXPECT_EQ(CleanText("abc", 2), "");
}

TEST(CleanText, ReplacesWhatIsNoUtf8) {
  EXPECT_EQ(CleanText("a\xff"
                      "b",
                      10),
            "a?b");
  EXPECT_EQ(CleanText("\xc0\xaf", 10), "??");       // overlong '/'
  EXPECT_EQ(CleanText("\xed\xa0\x80", 10), "???");  // a surrogate
  EXPECT_EQ(CleanText("x\xe2\x82", 10), "x??");     // cut in the middle
}

TEST(CheckId, AllowsOnlyItsAlphabet) {
  EXPECT_TRUE(CheckId("group", "engine-a_1.B").ok());
  for (const char* bad : {"", "a b", "a/b", "ä", "a\n"}) {
    EXPECT_FALSE(CheckId("group", bad).ok()) << bad;
  }
  EXPECT_TRUE(CheckId("group", std::string(kIdBytesMax, 'a')).ok());
  EXPECT_EQ(CheckId("group", std::string(kIdBytesMax + 1, 'a')).reason(), Reason::kMessageTooLarge);
}

TEST(TraceId, NoneIsZeroAndBack) {
  EXPECT_EQ(TraceIdFromProto("t", ""), (std::array<uint8_t, 16>{}));
  EXPECT_EQ(TraceIdToProto({}), "");
  EXPECT_FALSE(TraceIdFromProto("t", "123"));
}

}  // namespace
}  // namespace weightwire::wire
