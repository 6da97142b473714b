// Random damage to valid messages: no decoder may crash, hang or accept what its contract forbids;
// run under ASan and UBSan this finds reads out of bounds and overflows.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "server/wire/control.h"
#include "server/wire/fd_protocol.h"
#include "server/wire/journal.h"
#include "server/wire/layout.h"
#include "server/wire/slice.h"
#include "server/wire/status.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

constexpr uint64_t kSeeds = 20'000;

/// Flips, overwrites, cuts, repeats.
void Damage(Dice& dice, std::string& bytes) {
  for (size_t i = 1 + dice.Below(6); i > 0; --i) {
    const size_t at = bytes.empty() ? 0 : dice.Below(bytes.size());
    switch (bytes.empty() ? 3 : dice.Below(5)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << dice.Below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(dice.Next());
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(at, 1 + dice.Below(9), static_cast<char>(dice.Next()));
        break;
      default:
        bytes += bytes.substr(at);
        break;
    }
    if (bytes.size() > 1 << 16) bytes.resize(1 << 16);
  }
}

/// True when the bytes parsed and were accepted.
using Decoder = std::function<bool(const std::string&)>;

template <typename Message, typename Decode>
Decoder Of(Decode decode) {
  return [decode](const std::string& bytes) {
    Message message;
    return message.ParseFromString(bytes) && decode(message);
  };
}

std::vector<Decoder> Decoders() {
  return {
      Of<v1::SessionDown>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::ReportRequest>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::RegisterRequest>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::AgentHello>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::AgentWelcome>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::PublishVersionRequest>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::WithdrawVersionRequest>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::SubmitLayoutRequest>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::SubmitLayoutResponse>([](const auto& m) { return FromProto(m).has_value(); }),
      Of<v1::LayoutSubmission>([](const auto& m) { return FromProto("m", m).has_value(); }),
      Of<v1::Outcome>([](const auto& m) { return FromProto("m", m).has_value(); }),
      Of<v1::SlicePart>([](const auto& m) {
        SliceReader reader;
        return reader.Add(m).ok() && reader.Finish().has_value();
      }),
      [](const std::string& bytes) { return FromCall(3, "message", bytes).ok(); },
      [](const std::string& bytes) { return DecodeRecord(bytes).has_value(); },
      [](const std::string& bytes) {
        FdFrame frame{};
        for (size_t i = 0; i < std::min(bytes.size(), frame.size()); ++i) {
          frame[i] = static_cast<std::byte>(bytes[i]);
        }
        return DecodeFdRequest(frame).has_value() && DecodeFdReply(frame).has_value();
      },
  };
}

std::string ValidBytes(Dice& dice) {
  switch (dice.Below(8)) {
    case 0:
      return ToProto(RandomCommand(dice)).SerializeAsString();
    case 1:
      return ToProto(AgentId(3), RandomReport(dice)).SerializeAsString();
    case 2:
      return ToProto(RandomRegister(dice)).SerializeAsString();
    case 3:
      return ToProto(RandomHello(dice)).SerializeAsString();
    case 4:
      return ToProto(RandomPublish(dice)).SerializeAsString();
    case 5:
      return ToProto(RandomSubmission(dice)).SerializeAsString();
    case 6: {
      SliceWriter writer(std::make_shared<const plan::RankSlice>(RandomSlice(dice, 3, 6)), 1 << 20,
                         dice.Coin());
      v1::SlicePart part;
      EXPECT_TRUE(writer.Next(&part));
      return part.SerializeAsString();
    }
    default:
      return EncodeRecord(RandomRecord(dice));
  }
}

TEST(WireFuzz, SurvivesDamagedMessages) {
  const uint64_t first = SeedFromEnvironment();
  std::printf("seeds %llu to %llu\n", static_cast<unsigned long long>(first),
              static_cast<unsigned long long>(first + kSeeds - 1));
  const std::vector<Decoder> decoders = Decoders();
  uint64_t accepted = 0;
  uint64_t refused = 0;
  for (uint64_t seed = first; seed < first + kSeeds; ++seed) {
    SCOPED_TRACE(seed);
    Dice dice(seed);
    std::string bytes = ValidBytes(dice);
    if (seed % 16 != 0) Damage(dice, bytes);
    for (const Decoder& decoder : decoders) ++(decoder(bytes) ? accepted : refused);
  }
  // Both must happen, or the damage is of no use.
  EXPECT_GT(accepted, kSeeds / 100);
  EXPECT_GT(refused, kSeeds);
}

}  // namespace
}  // namespace weightwire::wire
