#include "server/wire/control.h"

#include <gtest/gtest.h>

#include <limits>

#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

constexpr int kRounds = 2'000;

/// Through real bytes, as gRPC does it.
template <typename Message>
Message OverTheWire(const Message& message) {
  Message out;
  EXPECT_TRUE(out.ParseFromString(message.SerializeAsString()));
  return out;
}

class ControlWire : public ::testing::Test {
 protected:
  void SetUp() override {
    const uint64_t seed = SeedFromEnvironment();
    RecordProperty("seed", std::to_string(seed));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    dice_ = Dice(seed);
  }
  Dice dice_{0};
};

TEST(HeldWire, EpochsAreSetAndFall) {
  const auto held = [](std::vector<uint64_t> epochs) {
    HeldContents out;
    for (const uint64_t epoch : epochs) out.Add()->set_epoch(epoch);
    return out;
  };
  EXPECT_EQ(ContentsFromProto("holds", held({3, 2, 1}))->size(), 3u);
  EXPECT_EQ(ContentsFromProto("holds", {Epoch(4), Version(1)}, held({3, 1}))->size(), 3u);
  EXPECT_TRUE(ContentsFromProto("holds", {}, held({}))->empty()) << "an older peer says no more";
  for (const auto& wrong : {held({0}), held({2, 2}), held({1, 2}), held({2, 0})}) {
    EXPECT_FALSE(ContentsFromProto("holds", wrong).has_value());
  }
  EXPECT_FALSE(ContentsFromProto("holds", {}, held({1})).has_value()) << "there is no newest";
  EXPECT_FALSE(ContentsFromProto("holds", {Epoch(3), Version(1)}, held({3})).has_value());
  EXPECT_FALSE(
      ContentsFromProto("holds", held(std::vector<uint64_t>(kHeldMax + 1, 1))).has_value());
}

TEST(TroublesWire, ComeBackEqualAndAreCutWhereTheyAreTooMany) {
  const control::Trouble one{
      {ParticipantId(1), Incarnation(2)}, "its process 7 is stopped", "wake it"};
  const control::Trouble two{{}, "refused a process of uid 9", "the same user"};
  v1::Heartbeat heartbeat;
  SetTroubles({one, two}, &heartbeat);
  EXPECT_EQ(TroublesOf(OverTheWire(heartbeat)), (control::Troubles{one, two}));
  SetTroubles({}, &heartbeat);
  EXPECT_TRUE(TroublesOf(heartbeat).empty())
      << "a message that is used again forgets the last ones";
  SetTroubles(control::Troubles(100, one), &heartbeat);
  EXPECT_EQ(static_cast<size_t>(heartbeat.troubles_size()), kTroublesMax);
  heartbeat.mutable_troubles(0)->mutable_member()->set_participant(0);  // nobody
  heartbeat.mutable_troubles(1)->set_what(std::string(10'000, 'x'));
  for (int i = 0; i < 100; ++i) *heartbeat.add_troubles() = heartbeat.troubles(2);
  const control::Troubles read = TroublesOf(heartbeat);
  EXPECT_EQ(read.size(), kTroublesMax);
  EXPECT_EQ(read[0].what.size(), kTextBytesMax);
}

TEST(BeatWire, ReceivingRanksComeBackEqualAndAreCutWhereTheyAreTooMany) {
  const control::Receiving one{{ParticipantId(1), Incarnation(2)}, Epoch(7), int64_t{1} << 40};
  const control::Receiving two{{ParticipantId(3), Incarnation(4)}, Epoch(8), 0};
  v1::Heartbeat heartbeat;
  SetBeat({{{{}, "refused", "the same user"}}, {one, two}}, &heartbeat);
  const control::Beat read = BeatOf(OverTheWire(heartbeat));
  EXPECT_EQ(read.receiving, (std::vector{one, two}));
  EXPECT_EQ(read.troubles.size(), 1u);
  SetBeat({}, &heartbeat);
  EXPECT_TRUE(BeatOf(heartbeat).receiving.empty()) << "a message that is used again";
  SetBeat({{}, std::vector(300, one)}, &heartbeat);
  EXPECT_EQ(static_cast<size_t>(heartbeat.receiving_size()), kReceivingMax);
  heartbeat.mutable_receiving(0)->mutable_member()->set_participant(0);  // nobody
  heartbeat.mutable_receiving(1)->set_bytes_done(-1);
  EXPECT_EQ(BeatOf(heartbeat).receiving.size(), kReceivingMax - 2);
  for (int i = 0; i < 300; ++i) *heartbeat.add_receiving() = heartbeat.receiving(2);
  EXPECT_EQ(BeatOf(heartbeat).receiving.size(), kReceivingMax);
}

TEST(VersionWire, ANumberAfterWhichNoneFollowsIsRefused) {
  v1::PublishVersionRequest request =
      ToProto(control::PublishRequest{.member = {ParticipantId(1), Incarnation(2)},
                                      .version = Version(kVersionMax),
                                      .deadline = Nanos(1)});
  request.set_deadline_ms(1);
  EXPECT_EQ(FromProto(request)->version, Version(kVersionMax));
  request.set_version(kVersionMax + 1);
  const auto refused = FromProto(request);
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message().find("9223372036854775807"), std::string::npos);
  request.set_version(0);
  EXPECT_FALSE(FromProto(request).has_value());
}

TEST_F(ControlWire, CommandsComeBackEqual) {
  for (int i = 0; i < kRounds; ++i) {
    const epoch::Command command = RandomCommand(dice_);
    auto back = FromProto(OverTheWire(ToProto(command)));
    ASSERT_TRUE(back) << back.error().ToString();
    ASSERT_EQ(*back, command) << "round " << i;
  }
}

TEST_F(ControlWire, ReportsComeBackEqual) {
  for (int i = 0; i < kRounds; ++i) {
    const AgentReport report{AgentId(1 + i), RandomReport(dice_)};
    auto back = FromProto(OverTheWire(ToProto(report.agent, report.report)));
    ASSERT_TRUE(back) << back.error().ToString();
    ASSERT_EQ(*back, report) << "round " << i;
  }
}

TEST_F(ControlWire, RequestsComeBackEqual) {
  for (int i = 0; i < kRounds; ++i) {
    const auto hello = RandomHello(dice_);
    ASSERT_EQ(FromProto(OverTheWire(ToProto(hello))), hello);
    const auto registration = RandomRegister(dice_);
    ASSERT_EQ(FromProto(OverTheWire(ToProto(registration))), registration);
    const auto publication = RandomPublish(dice_);
    ASSERT_EQ(FromProto(OverTheWire(ToProto(publication))), publication);
    const auto withdrawal = RandomWithdraw(dice_);
    ASSERT_EQ(FromProto(OverTheWire(ToProto(withdrawal))), withdrawal);
  }
}

TEST_F(ControlWire, WelcomeComesBackEqual) {
  const control::AgentWelcome welcome{AgentId(7), 1, std::chrono::milliseconds(250),
                                      std::chrono::seconds(5), JournalId(11)};
  EXPECT_EQ(FromProto(OverTheWire(ToProto(welcome))), welcome);
}

TEST_F(ControlWire, RoundsDeadlinesUpToMilliseconds) {
  EXPECT_EQ(MillisOf(Nanos(1)), 1u);
  EXPECT_EQ(MillisOf(std::chrono::milliseconds(3)), 3u);
  EXPECT_EQ(MillisOf(std::chrono::hours(10'000'000 / 3'600)), 4294967295u);
}

struct BadCase {
  const char* name;
  std::function<Status()> decode;
  Reason reason;
  const char* field;
};

TEST(ControlWireRefuses, EachWithItsField) {
  Dice dice(1);
  auto prepare = [&](auto change) {
    epoch::Command command;
    do {
      command = RandomCommand(dice);
    } while (command.index() != 0);
    v1::SessionDown down = ToProto(command);
    change(down.mutable_prepare());
    return FromProto(down).error();
  };
  auto registration = [&](auto change) {
    v1::RegisterRequest request = ToProto(RandomRegister(dice));
    change(&request);
    return FromProto(request).error();
  };
  auto report = [&](auto change) {
    v1::ReportRequest request =
        ToProto(AgentId(1), epoch::PreparedReport{Epoch(1), RandomMember(dice)});
    change(&request);
    return FromProto(request).error();
  };
  const std::vector<BadCase> cases = {
      {"kind", [&] { return prepare([](auto* p) { p->set_kind(static_cast<v1::EpochKind>(9)); }); },
       Reason::kUnknownEnum, "prepare.kind"},
      {"role", [&] { return prepare([](auto* p) { p->set_role(v1::MEMBER_ROLE_UNSPECIFIED); }); },
       Reason::kUnknownEnum, "prepare.role"},
      {"epoch", [&] { return prepare([](auto* p) { p->set_epoch(0); }); }, Reason::kInvalidRequest,
       "prepare.epoch"},
      {"member", [&] { return prepare([](auto* p) { p->clear_member(); }); },
       Reason::kInvalidRequest, "prepare.member"},
      {"ticket", [&] { return prepare([](auto* p) { p->add_admitted()->set_ticket("short"); }); },
       Reason::kInvalidRequest, "prepare.admitted.ticket"},
      {"reader", [&] { return prepare([](auto* p) { p->add_readers()->set_rank(1); }); },
       Reason::kInvalidRequest, "prepare.readers.participant"},
      {"reader without a ticket",
       [&] {
         return prepare([](auto* p) {
           p->clear_readers();
           p->add_readers()->set_participant(1);
           p->mutable_readers(0)->set_admitted(static_cast<uint32_t>(p->admitted_size()));
         });
       },
       Reason::kInvalidRequest, "prepare.readers.admitted"},
      {"addresses left off",
       [&] {
         return prepare([](auto* p) {
           (*p->mutable_sources())[0].set_agent(1);
           (*p->mutable_sources())[0].set_incarnation(1);
           (*p->mutable_sources())[0].set_as_told(true);
         });
       },
       Reason::kInvalidRequest, "prepare.sources"},
      {"trace", [&] { return prepare([](auto* p) { p->set_trace_id("12345"); }); },
       Reason::kInvalidRequest, "prepare.trace_id"},
      {"group role",
       [&] { return registration([](auto* r) { r->set_role(static_cast<v1::GroupRole>(77)); }); },
       Reason::kUnknownEnum, "role"},
      {"group", [&] { return registration([](auto* r) { r->set_group("a/b"); }); },
       Reason::kInvalidRequest, "group"},
      {"long group",
       [&] { return registration([](auto* r) { r->set_group(std::string(129, 'a')); }); },
       Reason::kMessageTooLarge, "group"},
      {"incarnation", [&] { return registration([](auto* r) { r->set_incarnation(0); }); },
       Reason::kInvalidRequest, "incarnation"},
      {"report kind", [&] { return report([](auto* r) { r->clear_kind(); }); },
       Reason::kInvalidRequest, "report"},
      {"report epoch", [&] { return report([](auto* r) { r->set_epoch(0); }); },
       Reason::kInvalidRequest, "epoch"},
      {"reason",
       [&] {
         return report([](auto* r) {
           r->mutable_failed()->mutable_why()->set_code(3);
           r->mutable_failed()->mutable_why()->mutable_detail()->set_reason(
               static_cast<v1::Reason>(999));
         });
       },
       Reason::kUnknownEnum, "failed.why.detail.reason"},
      {"code",
       [&] { return report([](auto* r) { r->mutable_lost()->mutable_why()->set_code(99); }); },
       Reason::kUnknownEnum, "lost.why.code"},
      {"transport",
       [&] {
         return report(
             [](auto* r) { (*r->mutable_staged()->mutable_bytes_by_transport())[""] = 1; });
       },
       Reason::kInvalidRequest, "staged.bytes_by_transport"},
      {"seconds that are no number",
       [&] {
         return report([](auto* r) {
           r->mutable_staged()->set_seconds(std::numeric_limits<double>::quiet_NaN());
         });
       },
       Reason::kInvalidRequest, "staged.seconds"},
      {"a span before all time",
       [&] {
         return report([](auto* r) {
           r->add_spans()->set_name("stage");
           r->mutable_spans(0)->set_begin_us(-1);
         });
       },
       Reason::kInvalidRequest, "spans"},
      {"more spans than a report may have",
       [&] {
         return report([](auto* r) {
           for (size_t i = 0; i <= epoch::kSpansMax; ++i) r->add_spans()->set_name("read");
         });
       },
       Reason::kMessageTooLarge, "spans"},
      {"a swap that takes less than no time",
       [&] { return report([](auto* r) { r->mutable_applied()->set_flip_seconds(-1); }); },
       Reason::kInvalidRequest, "applied.flip_seconds"},
  };
  for (const BadCase& bad : cases) {
    const Status status = bad.decode();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << bad.name;
    EXPECT_EQ(status.reason(), bad.reason) << bad.name;
    EXPECT_EQ(status.message().rfind(bad.field, 0), 0u) << bad.name << ": " << status.message();
  }
}

TEST(ControlWireRefuses, WelcomeAsCommand) {
  v1::SessionDown down;
  down.mutable_welcome()->set_agent(1);
  EXPECT_EQ(FromProto(down).error().reason(), Reason::kInvalidRequest);
}

}  // namespace
}  // namespace weightwire::wire
