#include "server/transport/spans.h"

#include <cstring>
#include <random>

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

TEST(ForEachStretch, CopiesLikeAFlatCopyAndNoStretchIsTooLong) {
  std::mt19937_64 random(17);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> source(1 + random() % 2000);
    for (std::byte& byte : source) byte = static_cast<std::byte>(random());
    std::vector<std::byte> target(source.size());
    std::vector<ConstSpan> from;
    std::vector<MutableSpan> into;
    for (size_t at = 0; at < source.size();) {
      const size_t bytes = random() % std::min<size_t>(source.size() - at + 1, 100);
      from.push_back(std::span(source).subspan(at, bytes));
      at += bytes;
    }
    for (size_t at = 0; at < target.size();) {
      const size_t bytes = random() % std::min<size_t>(target.size() - at + 1, 300);
      into.push_back(std::span(target).subspan(at, bytes));
      at += bytes;
    }
    ASSERT_EQ(TotalBytes(into), target.size());
    const size_t longest = 1 + random() % 50;
    EXPECT_TRUE(
        ForEachStretch(from, into, longest, [&](std::byte* to, const std::byte* at, size_t bytes) {
          EXPECT_LE(bytes, longest);
          std::memcpy(to, at, bytes);
          return true;
        }));
    ASSERT_EQ(target, source);
  }
}

TEST(SpanWriter, WritesLikeAFlatCopyHoweverTheBytesCome) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<std::byte> sent(random() % 300);
    for (std::byte& byte : sent) byte = static_cast<std::byte>(random());
    std::vector<std::byte> written(sent.size());
    std::vector<MutableSpan> into;  // empty ones too, also at the ends
    for (size_t at = 0; at < written.size() || into.size() < 3;) {
      const size_t some = random() % std::min<size_t>(written.size() - at + 1, 40);
      into.push_back(std::span(written).subspan(at, some));
      at += some;
    }
    SpanWriter writer(into);
    for (ConstSpan rest = sent; !rest.empty();) {
      const ConstSpan piece = rest.first(random() % (rest.size() + 1));
      writer.Write(piece);
      rest = rest.subspan(piece.size());
    }
    EXPECT_EQ(written, sent);
  }
}

TEST(ForEachStretch, StopsWhereItIsTold) {
  std::vector<std::byte> bytes(100);
  int calls = 0;
  EXPECT_FALSE(ForEachStretch(std::vector<ConstSpan>{bytes}, std::vector<MutableSpan>{bytes}, 10,
                              [&](std::byte*, const std::byte*, size_t) { return ++calls < 3; }));
  EXPECT_EQ(calls, 3);
}

}  // namespace
}  // namespace weightwire::transport
