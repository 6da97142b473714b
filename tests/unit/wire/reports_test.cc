#include "server/wire/reports.h"

#include <gtest/gtest.h>

#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

constexpr AgentId kAgent{3};
constexpr epoch::Member kMember{ParticipantId(4), Incarnation(5)};

/// With `digests` of some 30 bytes each.
epoch::Report Sourced(uint64_t epoch, size_t digests) {
  epoch::SourceDoneReport report{Epoch(epoch), kMember, {}};
  for (size_t i = 0; i < digests; ++i) {
    report.digests.push_back({PlanId{1 + epoch, 2}, static_cast<uint32_t>(i), ~i});
  }
  return report;
}

/// Through real bytes, each message as short as it must be.
std::vector<v1::Reports> MessagesOf(ReportsWriter& writer) {
  std::vector<v1::Reports> out;
  v1::SessionUp up;
  while (!writer.empty()) {
    writer.Next(up.mutable_reports());
    EXPECT_LE(up.ByteSizeLong(), kPartBytesMax + 4'096);
    v1::SessionUp over;
    EXPECT_TRUE(over.ParseFromString(up.SerializeAsString()));
    out.push_back(over.reports());
  }
  return out;
}

std::vector<Result<AgentReport>> Read(const std::vector<v1::Reports>& messages) {
  std::vector<Result<AgentReport>> out;
  ReportsReader reader;
  for (const v1::Reports& message : messages) {
    for (auto& report : reader.Add(message)) out.push_back(std::move(report));
  }
  return out;
}

TEST(ReportsWire, WhatWaitsTravelsTogetherInOrderAndComesBackEqual) {
  Dice dice(7);
  ReportsWriter writer;
  std::vector<epoch::Report> reports;
  for (uint64_t i = 1; i <= 500; ++i) {
    reports.push_back(RandomReport(dice));
    writer.Add(ToProto(kAgent, reports.back()), i % 7 == 0 ? i : 0);
  }
  const auto messages = MessagesOf(writer);
  EXPECT_LT(messages.size(), 5u);
  EXPECT_EQ(messages.back().number(), 497u);
  const auto read = Read(messages);
  ASSERT_EQ(read.size(), reports.size());
  for (size_t i = 0; i < read.size(); ++i) {
    ASSERT_TRUE(read[i]) << read[i].error().ToString();
    ASSERT_EQ(*read[i], (AgentReport{kAgent, reports[i]})) << i;
  }
}

TEST(ReportsWire, OneThatIsTooLongForAMessageTravelsInPartsBetweenTheOthers) {
  // Sizes around one part and two, to the byte: a status' text makes them.
  for (size_t extra : {0, 1, 2, 3, 17}) {
    const std::vector<epoch::Report> reports = {Sourced(1, 3), Sourced(2, 200'000 + extra),
                                                Sourced(3, 1), Sourced(4, 40'000),
                                                Sourced(5, 300'000 + extra)};
    ReportsWriter writer;
    uint64_t number = 0;
    for (const auto& report : reports) writer.Add(ToProto(kAgent, report), ++number);
    const auto messages = MessagesOf(writer);
    EXPECT_GT(messages.size(), 10u);
    const auto read = Read(messages);
    ASSERT_EQ(read.size(), reports.size());
    for (size_t i = 0; i < read.size(); ++i) {
      ASSERT_TRUE(read[i]) << read[i].error().ToString();
      ASSERT_EQ(read[i]->report, reports[i]) << i;
    }
    // Nobody hears that a report was taken before it was.
    size_t whole = 0;
    ReportsReader reader;
    for (const auto& message : messages) {
      whole += reader.Add(message).size();
      EXPECT_LE(message.number(), whole);
    }
  }
}

TEST(ReportsWire, APartOfExactlyTheLimitIsFollowedByNoEmptyOne) {
  const auto sized = [](size_t bytes) {
    v1::ReportRequest report =
        ToProto(kAgent, epoch::FailedReport{Epoch(1), kMember, Status(Code::kAborted, {}, "x")});
    std::string& text = *report.mutable_failed()->mutable_why()->mutable_message();
    text.resize(bytes - report.ByteSizeLong(), 'x');
    while (report.ByteSizeLong() > bytes) text.pop_back();
    EXPECT_EQ(report.ByteSizeLong(), bytes);
    return report;
  };
  for (const size_t bytes : {kPartBytesMax - 1, kPartBytesMax, kPartBytesMax + 1,
                             2 * kPartBytesMax - 1, 2 * kPartBytesMax, 2 * kPartBytesMax + 1}) {
    ReportsWriter writer;
    writer.Add(sized(bytes), 1);
    const auto messages = MessagesOf(writer);
    EXPECT_EQ(messages.size(), (bytes + kPartBytesMax - 1) / kPartBytesMax) << bytes;
    // (Its text is over its own limit: it comes through whole, and is refused for that.)
    const auto read = Read(messages);
    ASSERT_EQ(read.size(), 1u);
    EXPECT_NE(read[0].error().message().find("4096"), std::string::npos);
  }
}

TEST(ReportsWire, WhatCannotBeReadIsLostAloneAndSaysSo) {
  ReportsReader reader;
  v1::Reports message;
  *message.add_reports() = ToProto(kAgent, Sourced(1, 1));
  message.add_reports();
  *message.add_reports() = ToProto(kAgent, Sourced(2, 1));
  auto read = reader.Add(message);
  ASSERT_EQ(read.size(), 3u);
  EXPECT_TRUE(read[0]);
  EXPECT_FALSE(read[1]);
  EXPECT_TRUE(read[2]);

  v1::Reports part;  // of a report that never ends, and then others
  part.set_part("abc");
  part.set_more(true);
  EXPECT_TRUE(reader.Add(part).empty());
  read = reader.Add(message);
  ASSERT_EQ(read.size(), 4u);
  EXPECT_FALSE(read[0]);
  EXPECT_TRUE(read[1]);

  part.set_more(false);
  read = reader.Add(part);
  ASSERT_EQ(read.size(), 1u);
  EXPECT_FALSE(read[0]);
}

TEST(ReportsWire, OneOverTheLimitIsRefusedOnceAndTheNextOneIsRead) {
  ReportsReader reader;
  v1::Reports part;
  part.set_part(std::string(kPartBytesMax, 'x'));
  part.set_more(true);
  size_t refused = 0;
  for (size_t bytes = 0; bytes < 3 * kReportBytesMax; bytes += kPartBytesMax) {
    for (const auto& report : reader.Add(part)) {
      EXPECT_EQ(report.error().reason(), Reason::kMessageTooLarge);
      ++refused;
    }
  }
  EXPECT_EQ(refused, 1u);
  part.set_more(false);
  EXPECT_TRUE(reader.Add(part).empty());
  ReportsWriter writer;
  writer.Add(ToProto(kAgent, Sourced(1, 200'000)), 0);
  size_t read = 0;
  for (const auto& message : MessagesOf(writer)) {
    for (const auto& report : reader.Add(message)) read += report.has_value();
  }
  EXPECT_EQ(read, 1u);
}

TEST(ReportsWire, OneThatCannotBeSentSaysThatItFailedInstead) {
  const auto within = [](const epoch::Report& report) {
    return FromProto(ReportWithin(1'000, kAgent, report))->report;
  };
  EXPECT_EQ(within(Sourced(1, 2)), Sourced(1, 2));
  const auto failed = std::get<epoch::FailedReport>(within(Sourced(6, 100)));
  EXPECT_EQ(failed.epoch, Epoch(6));
  EXPECT_EQ(failed.member, kMember);
  EXPECT_EQ(failed.why.reason(), Reason::kMessageTooLarge);
  EXPECT_FALSE(failed.refused);
  epoch::HashedReport attested{Epoch(2), kMember, 9, OkStatus(), {}, 1};
  attested.sums.resize(1'000);
  const auto unread = std::get<epoch::HashedReport>(within(attested));
  EXPECT_EQ(unread.verification, 9u);
  EXPECT_EQ(unread.why.reason(), Reason::kMessageTooLarge);
  EXPECT_TRUE(unread.sums.empty());
}

}  // namespace
}  // namespace weightwire::wire
