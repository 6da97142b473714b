#include "server/transport/frame_mac.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace weightwire::transport {
namespace {

Proof SomeKey() {
  Proof key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = static_cast<uint8_t>(i);
  return key;
}

std::vector<std::byte> Message(size_t bytes) {
  std::vector<std::byte> message(bytes);
  for (size_t i = 0; i < bytes; ++i) message[i] = static_cast<std::byte>(i);
  return message;
}

FrameTag TagOf(FrameMac& mac, std::span<const std::byte> unit) {
  mac.Add(unit);
  return mac.Seal();
}

std::string Hex(const FrameTag& tag) {
  std::string hex;
  for (std::byte byte : tag) {
    hex += "0123456789abcdef"[std::to_integer<int>(byte) >> 4];
    hex += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return hex;
}

bool Fits(FrameMac& mac, std::span<const std::byte> unit, const FrameTag& tag) {
  mac.Add(unit);
  return mac.Fits(tag);
}

/// From Python's hmac and `openssl mac … GMAC`: a peer of another build must come to the same.
TEST(FrameMac, TagsAreWhatAnotherImplementationMakes) {
  FrameMac mac(SomeKey(), Sender::kCaller, 3);
  EXPECT_EQ(Hex(TagOf(mac, Message(300))), "d4fe1b102aa443fe5ac64aa99255e576");
  EXPECT_EQ(Hex(TagOf(mac, Message(64))), "85aa88614acc40ad2bffe01cb9a68b49");
  FrameMac other(SomeKey(), Sender::kCallee, 3);
  EXPECT_EQ(Hex(TagOf(other, Message(300))), "03e26184f4ac19c8dac417f4e7277950");
}

TEST(FrameMac, ItDoesNotMatterInWhichPiecesAUnitComes) {
  const auto unit = Message(5'000);
  FrameMac seals(SomeKey(), Sender::kCaller, 0);
  FrameMac checks(SomeKey(), Sender::kCaller, 0);
  for (size_t piece : {1u, 15u, 16u, 17u, 999u, 5'000u}) {
    const FrameTag tag = TagOf(seals, unit);
    for (size_t at = 0; at < unit.size(); at += piece) {
      checks.Add(std::span(unit).subspan(at, std::min(piece, unit.size() - at)));
    }
    EXPECT_TRUE(checks.Fits(tag)) << piece;
  }
}

TEST(FrameMac, NoBitOfUnitOrTagCanChange) {
  auto unit = Message(100);
  FrameMac seals(SomeKey(), Sender::kCaller, 0);
  FrameTag tag = TagOf(seals, unit);
  for (size_t bit = 0; bit < 8 * unit.size(); ++bit) {
    FrameMac checks(SomeKey(), Sender::kCaller, 0);
    unit[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(Fits(checks, unit, tag)) << "bit " << bit;
    unit[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
  for (size_t bit = 0; bit < 8 * kTagBytes; ++bit) {
    FrameMac checks(SomeKey(), Sender::kCaller, 0);
    tag[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(Fits(checks, unit, tag)) << "bit " << bit << " of the tag";
    tag[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
  FrameMac checks(SomeKey(), Sender::kCaller, 0);
  EXPECT_FALSE(Fits(checks, std::span(unit).first(99), tag));
}

TEST(FrameMac, AUnitFitsOnlyInItsPlace) {
  const auto unit = Message(64);
  FrameMac seals(SomeKey(), Sender::kCaller, 1);
  const FrameTag first = TagOf(seals, unit);
  const FrameTag second = TagOf(seals, unit);
  FrameMac late(SomeKey(), Sender::kCaller, 1);
  EXPECT_FALSE(Fits(late, unit, second)) << "the first was left out";
  FrameMac twice(SomeKey(), Sender::kCaller, 1);
  EXPECT_TRUE(Fits(twice, unit, first));
  EXPECT_FALSE(Fits(twice, unit, first)) << "it was repeated";
  FrameMac other_socket(SomeKey(), Sender::kCaller, 2);
  EXPECT_FALSE(Fits(other_socket, unit, first));
  FrameMac other_way(SomeKey(), Sender::kCallee, 1);
  EXPECT_FALSE(Fits(other_way, unit, first));
  Proof key = SomeKey();
  key[31] ^= 1;
  FrameMac other_session(key, Sender::kCaller, 1);
  EXPECT_FALSE(Fits(other_session, unit, first));
}

TEST(FrameMacs, EachSideChecksWhatTheOtherSeals) {
  FrameMacs caller(SomeKey(), Sender::kCaller, 0);
  FrameMacs callee(SomeKey(), Sender::kCallee, 0);
  const auto unit = Message(64);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(Fits(callee.in, unit, TagOf(caller.out, unit)));
    EXPECT_TRUE(Fits(caller.in, unit, TagOf(callee.out, unit)));
  }
  EXPECT_FALSE(Fits(caller.in, unit, TagOf(caller.out, unit))) << "its own, sent back";
}

}  // namespace
}  // namespace weightwire::transport
