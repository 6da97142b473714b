#include "server/transport/session.h"

#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/transport/codec_oracle.h"

namespace weightwire::transport {
namespace {

CallerHello SomeCallerHello() {
  CallerHello hello;
  hello.protocol_min = 0x0102;
  hello.protocol_max = 0x0304;
  hello.features = 0x1112131415161718;
  hello.caller = Incarnation(0x2122232425262728);
  hello.callee = Incarnation(0x3132333435363738);
  for (size_t i = 0; i < 16; ++i) {
    hello.shown[i] = static_cast<uint8_t>(0x40 + i);
    hello.nonce[i] = static_cast<uint8_t>(0x80 + i);
  }
  return hello;
}

std::mt19937_64 Random() {
  const char* text = std::getenv("WEIGHTWIRE_SEED");
  const uint64_t seed = text != nullptr ? std::strtoull(text, nullptr, 10) : 5;
  std::cout << "WEIGHTWIRE_SEED=" << seed << std::endl;
  return std::mt19937_64(seed);
}

TEST(CallerHelloCodec, FieldsLieWhereThePeerExpectsThem) {
  const auto bytes = EncodeCallerHello(SomeCallerHello());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), 4), "WWDP");
  EXPECT_EQ(ReadAt(bytes, 4, 4), 80u);
  EXPECT_EQ(ReadAt(bytes, 8, 2), 0x0102u);
  EXPECT_EQ(ReadAt(bytes, 10, 2), 0x0304u);
  EXPECT_EQ(ReadAt(bytes, 16, 8), 0x1112131415161718u);
  EXPECT_EQ(ReadAt(bytes, 24, 8), 0x2122232425262728u);
  EXPECT_EQ(ReadAt(bytes, 32, 8), 0x3132333435363738u);
  EXPECT_EQ(ReadAt(bytes, 40, 1), 0x40u);
  EXPECT_EQ(ReadAt(bytes, 55, 1), 0x4fu);
  EXPECT_EQ(ReadAt(bytes, 56, 1), 0x80u);
  EXPECT_EQ(ReadAt(bytes, 71, 1), 0x8fu);
}

TEST(CallerHelloCodec, RoundTrips) {
  auto decoded = DecodeCallerHello(EncodeCallerHello(SomeCallerHello()));
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(*decoded, SomeCallerHello());
}

TEST(CallerHelloCodec, RefusesEverySingleBitFlip) {
  for (size_t bit = 0; bit < kCallerHelloBytes * 8; ++bit) {
    auto bytes = EncodeCallerHello(SomeCallerHello());
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    auto decoded = DecodeCallerHello(bytes);
    ASSERT_FALSE(decoded.has_value()) << "bit " << bit;
    EXPECT_EQ(decoded.error().code(), Code::kInvalidArgument);
    EXPECT_EQ(decoded.error().reason(), Reason::kInvalidRequest);
  }
}

TEST(CallerHelloCodec, RefusesEveryOtherSizeAndRandomBytes) {
  std::mt19937_64 random = Random();
  const auto good = EncodeCallerHello(SomeCallerHello());
  for (size_t size = 0; size < 200; ++size) {
    std::vector<std::byte> bytes(good.begin(), good.end());
    bytes.resize(size);
    if (size != kCallerHelloBytes) {
      EXPECT_FALSE(DecodeCallerHello(bytes).has_value());
    }
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    EXPECT_FALSE(DecodeCallerHello(bytes).has_value());
    EXPECT_FALSE(DecodeCalleeReply(bytes).has_value());
    EXPECT_FALSE(DecodeCalleeProof(bytes).has_value());
    EXPECT_FALSE(DecodeCallerProof(bytes).has_value());
  }
}

TEST(ProofCodecs, RoundTripAndRefuseEverySingleBitFlip) {
  const CalleeProof callee_proof{{1, 2, 3}, {4, 5, 6}};
  EXPECT_EQ(DecodeCalleeProof(EncodeCalleeProof(callee_proof)).value(), callee_proof);
  for (size_t bit = 0; bit < kCalleeProofBytes * 8; ++bit) {
    auto bytes = EncodeCalleeProof(callee_proof);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(DecodeCalleeProof(bytes).has_value()) << "bit " << bit;
  }
  const Proof proof{7, 8, 9};
  EXPECT_EQ(DecodeCallerProof(EncodeCallerProof(proof)).value(), proof);
  for (size_t bit = 0; bit < kCallerProofBytes * 8; ++bit) {
    auto bytes = EncodeCallerProof(proof);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(DecodeCallerProof(bytes).has_value()) << "bit " << bit;
  }
}

TEST(HelloReplyCodec, RoundTripsEveryCodeAndReason) {
  for (int code = 0; code <= 16; ++code) {
    for (int reason = 0; ReasonFromNumber(reason).has_value(); ++reason) {
      const CalleeReply reply{7, 0xabcdef, static_cast<Code>(code), static_cast<Reason>(reason)};
      auto decoded = DecodeCalleeReply(EncodeCalleeReply(reply));
      ASSERT_TRUE(decoded.has_value());
      EXPECT_EQ(*decoded, reply);
    }
  }
}

TEST(HelloReplyCodec, RefusesEverySingleBitFlip) {
  const CalleeReply reply{1, 2, Code::kUnauthenticated, Reason::kTicketRejected};
  for (size_t bit = 0; bit < kCalleeReplyBytes * 8; ++bit) {
    auto bytes = EncodeCalleeReply(reply);
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_FALSE(DecodeCalleeReply(bytes).has_value()) << "bit " << bit;
  }
}

TEST(HelloReplyCodec, RefusesCodesAndReasonsOfALaterBuild) {
  for (const CalleeReply& reply : {CalleeReply{1, 0, static_cast<Code>(17), Reason::kNone},
                                   CalleeReply{1, 0, Code::kOk, static_cast<Reason>(9999)},
                                   CalleeReply{1, 0, Code::kOk, static_cast<Reason>(-1)}}) {
    auto decoded = DecodeCalleeReply(EncodeCalleeReply(reply));
    ASSERT_FALSE(decoded.has_value());
    EXPECT_EQ(decoded.error().reason(), Reason::kUnknownEnum);
  }
}

TEST(ChooseProtocol, TakesTheHighestThatBothSpeak) {
  EXPECT_EQ(ChooseProtocol(kProtocolMin, kProtocolMax).value(), kProtocolMax);
  EXPECT_EQ(ChooseProtocol(0, 65535).value(), kProtocolMax);
  EXPECT_EQ(ChooseProtocol(1, 1).value(), 1);
  for (auto [low, high] : {std::pair<uint16_t, uint16_t>{kProtocolMax + 1, 65535},
                           {0, 0},
                           {kProtocolMax + 1, kProtocolMax},
                           {65535, 0}}) {
    auto chosen = ChooseProtocol(low, high);
    ASSERT_FALSE(chosen.has_value()) << low << ".." << high;
    EXPECT_EQ(chosen.error().code(), Code::kFailedPrecondition);
    EXPECT_EQ(chosen.error().reason(), Reason::kProtocolVersion);
    EXPECT_NE(chosen.error().message().find(std::to_string(low) + ".." + std::to_string(high)),
              std::string::npos);
  }
}

}  // namespace
}  // namespace weightwire::transport
