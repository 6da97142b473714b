#include "server/transfer/notify.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/unit/transfer/random_plan.h"

namespace weightwire::transfer {
namespace {

Notify Full(NotifyType type) {
  Notify notify;
  notify.type = type;
  notify.key = {Epoch(0x0102030405060708), 0x1112131415161718, 0x21222324,
                ParticipantId(0x31323334), ParticipantId(0x41424344)};
  return notify;
}

std::vector<Notify> OneOfEach() {
  std::vector<Notify> all;
  Notify open = Full(NotifyType::kOpen);
  open.maps = true;
  open.plan_high = 5;
  open.segment_bytes_max = 6;
  open.slot_bytes = 7;
  all.push_back(open);
  Notify binding = Full(NotifyType::kBinding);
  binding.binding = {8, 9};
  binding.sums = {10, 11};
  all.push_back(binding);
  Notify ready = Full(NotifyType::kReady);
  ready.memory = {12, 13};
  ready.offset = 14;
  ready.slot = 15;
  all.push_back(ready);
  ready.changed = true;
  all.push_back(ready);
  Notify credit = Full(NotifyType::kCredit);
  credit.slot = 16;
  credit.bytes_kept = 17;
  all.push_back(credit);
  for (NotifyType type : {NotifyType::kClose, NotifyType::kFail}) {
    Notify verdict = Full(type);
    verdict.code = Code::kDataLoss;
    verdict.reason = Reason::kDigestMismatch;
    all.push_back(verdict);
  }
  Notify waiting = Full(NotifyType::kWaiting);
  waiting.slot = 18;
  all.push_back(waiting);
  Notify delta = Full(NotifyType::kDelta);
  delta.memory = {19, 20};
  delta.delta_newest_bytes = 21;
  delta.delta_bytes = 22;
  delta.slot = 23;
  all.push_back(delta);
  return all;
}

TEST(Notify, ComesBackAsItWasAndFitsTheTransport) {
  for (const Notify& notify : OneOfEach()) {
    const NotifyBytes bytes = EncodeNotify(notify);
    EXPECT_LE(bytes.size, transport::kNotifyBytesMax);
    auto back = DecodeNotify(bytes.span());
    ASSERT_TRUE(back.has_value()) << NotifyTypeName(notify.type);
    EXPECT_EQ(*back, notify) << NotifyTypeName(notify.type);
  }
}

// Golden bytes: what older and newer builds on other hosts will read.
TEST(Notify, IsLittleEndianAtFixedPlaces) {
  Notify credit = Full(NotifyType::kCredit);
  credit.slot = 0x51525354;
  credit.bytes_kept = 0x6162636465666768;
  const std::vector<uint8_t> golden = {
      1,    4,    0,    0,    0x24, 0x23, 0x22, 0x21, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02,
      0x01, 0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x34, 0x33, 0x32, 0x31, 0x44, 0x43,
      0x42, 0x41, 0x54, 0x53, 0x52, 0x51, 0x68, 0x67, 0x66, 0x65, 0x64, 0x63, 0x62, 0x61};
  const NotifyBytes bytes = EncodeNotify(credit);
  ASSERT_EQ(bytes.size, golden.size());
  for (size_t i = 0; i < golden.size(); ++i) {
    EXPECT_EQ(std::to_integer<uint8_t>(bytes.data[i]), golden[i]) << i;
  }
}

// A reader of an older build takes it for an offset, at which it does not look.
TEST(Notify, TellsWhatHasChangedInABitOfTheOffset) {
  Notify ready = Full(NotifyType::kReady);
  ready.offset = 0x0102030405060708;
  NotifyBytes plain = EncodeNotify(ready);
  ready.changed = true;
  const NotifyBytes changed = EncodeNotify(ready);
  EXPECT_NE(plain.data, changed.data);
  plain.data[55] |= std::byte{0x80};
  EXPECT_EQ(plain.data, changed.data);
}

TEST(Notify, RefusesUnknownTypeCodeAndReason) {
  NotifyBytes bytes = EncodeNotify(Full(NotifyType::kCredit));
  bytes.data[1] = std::byte{77};
  EXPECT_EQ(DecodeNotify(bytes.span()).error().reason(), Reason::kUnknownEnum);
  bytes = EncodeNotify(Full(NotifyType::kFail));
  bytes.data[32] = std::byte{17};
  EXPECT_EQ(DecodeNotify(bytes.span()).error().reason(), Reason::kUnknownEnum);
  bytes = EncodeNotify(Full(NotifyType::kFail));
  bytes.data[38] = std::byte{1};
  EXPECT_EQ(DecodeNotify(bytes.span()).error().reason(), Reason::kUnknownEnum);
}

TEST(Notify, RefusesADeltaOfWhichMoreIsNewThanThereIs) {
  Notify delta = Full(NotifyType::kDelta);
  delta.delta_newest_bytes = 5;
  delta.delta_bytes = 4;
  EXPECT_EQ(DecodeNotify(EncodeNotify(delta).span()).error().reason(), Reason::kInvalidRequest);
}

TEST(Notify, RefusesAnotherVersion) {
  NotifyBytes bytes = EncodeNotify(Full(NotifyType::kCredit));
  bytes.data[0] = std::byte{2};
  EXPECT_EQ(DecodeNotify(bytes.span()).error().reason(), Reason::kProtocolVersion);
}

TEST(Notify, RefusesEveryOtherSizeAndReservedFlags) {
  for (const Notify& notify : OneOfEach()) {
    const NotifyBytes bytes = EncodeNotify(notify);
    for (size_t size = 0; size <= transport::kNotifyBytesMax; ++size) {
      if (size == bytes.size) continue;
      EXPECT_FALSE(DecodeNotify({bytes.data.data(), size}).has_value()) << size;
    }
    NotifyBytes flagged = bytes;
    flagged.data[2] |= std::byte{2};
    EXPECT_EQ(DecodeNotify(flagged.span()).error().reason(), Reason::kInvalidRequest);
  }
}

TEST(Notify, DecodesAnyBytesOrRefusesThemAndNeverLosesABit) {
  const uint64_t seed = testing::SeedOr(1);
  std::mt19937_64 rng(seed);
  const auto all = OneOfEach();
  size_t decoded = 0;
  for (int round = 0; round < 200'000; ++round) {
    NotifyBytes bytes = EncodeNotify(all[rng() % all.size()]);
    for (uint64_t flips = rng() % 4; flips > 0; --flips) {
      bytes.data[rng() % bytes.data.size()] ^= static_cast<std::byte>(rng());
    }
    if (rng() % 8 == 0) bytes.size = rng() % 65;
    auto notify = DecodeNotify(bytes.span());
    if (!notify.has_value()) continue;
    ++decoded;
    const NotifyBytes again = EncodeNotify(*notify);
    ASSERT_EQ(std::vector(again.span().begin(), again.span().end()),
              std::vector(bytes.span().begin(), bytes.span().end()))
        << "seed " << seed;
  }
  EXPECT_GT(decoded, 1'000u);
}

}  // namespace
}  // namespace weightwire::transfer
