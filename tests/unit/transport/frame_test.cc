#include "server/transport/frame.h"

#include <array>
#include <random>

#include "gtest/gtest.h"
#include "tests/unit/transport/codec_oracle.h"

namespace weightwire::transport {
namespace {

using FrameBytes = std::array<std::byte, kFrameBytes>;

Frame SomeFrame() {
  Frame frame;
  frame.type = FrameType::kGetReply;
  frame.code = Code::kNotFound;
  frame.reason = Reason::kStaleIncarnation;
  frame.request = 0x1112131415161718;
  frame.key = {0x2122232425262728, 0x3132333435363738};
  frame.offset = 0x4142434445464748;
  frame.length = 0x5152535455565758;
  return frame;
}

TEST(FrameCodec, FieldsLieWhereThePeerExpectsThem) {
  FrameBytes bytes;
  EncodeFrame(SomeFrame(), bytes);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 4), "WWFR");
  EXPECT_EQ(ReadAt(bytes, 4, 2), 2u);
  EXPECT_EQ(ReadAt(bytes, 6, 2), 5u);
  EXPECT_EQ(ReadAt(bytes, 8, 4), 16u);
  EXPECT_EQ(ReadAt(bytes, 16, 8), 0x1112131415161718u);
  EXPECT_EQ(ReadAt(bytes, 24, 8), 0x2122232425262728u);
  EXPECT_EQ(ReadAt(bytes, 32, 8), 0x3132333435363738u);
  EXPECT_EQ(ReadAt(bytes, 40, 8), 0x4142434445464748u);
  EXPECT_EQ(ReadAt(bytes, 48, 8), 0x5152535455565758u);
}

TEST(FrameCodec, RoundTripsEveryType) {
  for (uint16_t type = 1; type <= 11; ++type) {
    Frame frame = SomeFrame();
    frame.type = static_cast<FrameType>(type);
    FrameBytes bytes;
    EncodeFrame(frame, bytes);
    auto decoded = DecodeFrame(bytes);
    ASSERT_TRUE(decoded.has_value());
    EXPECT_EQ(*decoded, frame);
  }
}

TEST(FrameCodec, RefusesEverySingleBitFlip) {
  for (size_t bit = 0; bit < kFrameBytes * 8; ++bit) {
    FrameBytes bytes;
    EncodeFrame(SomeFrame(), bytes);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(DecodeFrame(bytes).has_value()) << "bit " << bit;
  }
}

TEST(FrameCodec, RefusesNumbersItDoesNotKnowUnderAGoodChecksum) {
  for (int field = 0; field < 4; ++field) {
    Frame frame = SomeFrame();
    if (field == 0) frame.type = static_cast<FrameType>(12);
    if (field == 1) frame.type = static_cast<FrameType>(0);
    if (field == 2) frame.code = static_cast<Code>(17);
    if (field == 3) frame.reason = static_cast<Reason>(12345);
    FrameBytes bytes;
    EncodeFrame(frame, bytes);
    auto decoded = DecodeFrame(bytes);
    ASSERT_FALSE(decoded.has_value()) << field;
    EXPECT_EQ(decoded.error().reason(), Reason::kInvalidRequest);
  }
}

}  // namespace
}  // namespace weightwire::transport
