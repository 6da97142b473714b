#include "server/wire/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

using ::testing::HasSubstr;

TEST(JournalWire, RecordsComeBackEqual) {
  Dice dice(SeedFromEnvironment());
  for (int i = 0; i < 2'000; ++i) {
    const coordinator::JournalRecord record = RandomRecord(dice);
    ASSERT_EQ(DecodeRecord(EncodeRecord(record)), record);
  }
}

TEST(JournalWire, BytesOfACommitAreFixed) {
  const std::string bytes =
      EncodeRecord(coordinator::CommitRecord{Epoch(3), Version(2), {"e"}, Epoch(1)});
  // Independent of this build: format, kind, epoch, version, the epoch that is held, how many
  // engines, FNV-1a of "e\xff"; then a checksum.
  const std::string body(
      "\x01\x06\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
      "\x01\0\0\0\0\0\0\0\x01\0\0\0"
      "\x0d\x8a\x38\xb5\x07\xc9\x8d\x08",
      38);
  ASSERT_EQ(bytes.size(), body.size() + 4);
  EXPECT_EQ(bytes.substr(0, body.size()), body);
}

/// The first bytes are as they were, so that an older version reads what it can understand; this it
/// cannot, and says so.
TEST(JournalWire, BytesOfACommitOfALaterLineageAreFixed) {
  coordinator::CommitRecord commit{Epoch(3), Version(2), {"e"}, Epoch(1)};
  commit.lineage = 1;
  commit.newest = 2;
  const std::string bytes = EncodeRecord(commit);
  const std::string body(
      "\x01\x07\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
      "\x01\0\0\0\0\0\0\0\x01\0\0\0"
      "\x0d\x8a\x38\xb5\x07\xc9\x8d\x08"
      "\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0",
      54);
  ASSERT_EQ(bytes.size(), body.size() + 4);
  EXPECT_EQ(bytes.substr(0, body.size()), body);
  EXPECT_EQ(DecodeRecord(bytes), coordinator::JournalRecord(commit));
}

/// What an earlier version reads is before it.
TEST(JournalWire, BytesOfACommitThatKnowsEarlierLineagesAreFixed) {
  coordinator::CommitRecord commit{Epoch(3), Version(2), {"e"}, Epoch(1)};
  commit.lineage = 1;
  commit.newest = 2;
  const size_t before = EncodeRecord(commit).size() - 4;
  commit.runs = {{Epoch(0), 1}, {Epoch(2), 2}, {Epoch(3), 1}};
  const std::string bytes = EncodeRecord(commit);
  const std::string runs(
      "\x03\0\0\0"
      "\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0"
      "\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0"
      "\x03\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0",
      52);
  ASSERT_EQ(bytes.size(), before + runs.size() + 4);
  EXPECT_EQ(bytes[1], 8);
  EXPECT_EQ(bytes.substr(before, runs.size()), runs);
  EXPECT_EQ(DecodeRecord(bytes), coordinator::JournalRecord(commit));
  for (const auto& wrong : std::vector<std::vector<coordinator::LineageRun>>{
           {{Epoch(2), 1}, {Epoch(2), 2}},  // they do not rise
           {{Epoch(2), 3}},                 // of none that there is
           std::vector<coordinator::LineageRun>(coordinator::kLineageRunsMax + 1)}) {
    commit.runs = wrong;
    EXPECT_EQ(DecodeRecord(EncodeRecord(commit)).error().code(), Code::kDataLoss);
  }
}

TEST(JournalWire, ACommitHasOneSizeHoweverManyEnginesItIsOf) {
  coordinator::CommitRecord commit{Epoch(3), Version(2), {}};
  const size_t none = EncodeRecord(commit).size();
  for (int i = 0; i < 10'000; ++i) commit.engines.Add(std::string(64, 'e') + std::to_string(i));
  EXPECT_EQ(EncodeRecord(commit).size(), none);
  EXPECT_EQ(DecodeRecord(EncodeRecord(commit)), coordinator::JournalRecord(commit));
}

/// Earlier versions wrote the engines' names into a commit; the bytes here are theirs.
TEST(JournalWire, ReadsCommitsThatNameTheirEngines) {
  const std::string commit(
      "\x01\x01\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x02\0\0\0\x01\0\0\0e\x01\0\0\0f"
      "\x58\x2f\xe5\x30",
      36);
  EXPECT_EQ(DecodeRecord(commit), coordinator::JournalRecord(
                                      coordinator::CommitRecord{Epoch(3), Version(2), {"e", "f"}}));
  const std::string rollback(
      "\x01\x03\x03\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\x01\0\0\0e"
      "\x01\0\0\0\0\0\0\0"
      "\xdd\x17\x43\x4d",
      39);
  EXPECT_EQ(DecodeRecord(rollback), coordinator::JournalRecord(coordinator::CommitRecord{
                                        Epoch(3), Version(2), {"e"}, Epoch(1)}));
}

TEST(JournalWire, BytesOfADrainAreFixed) {
  const std::string bytes = EncodeRecord(coordinator::DrainRecord{{{"e", Incarnation(7)}}});
  const std::string body("\x01\x05\x01\0\0\0\x01\0\0\0e\x07\0\0\0\0\0\0\0", 19);
  ASSERT_EQ(bytes.size(), body.size() + 4);
  EXPECT_EQ(bytes.substr(0, body.size()), body);
}

TEST(JournalWire, SaysOfAWholeRecordThatItDoesNotKnowThatANewerVersionWroteIt) {
  // Format and kind one after the newest ones; the checksums are FNV-1a, folded.
  for (const auto& [record, what] : {std::pair("\x01\x09\xd8\x9b\xc7\xbc", "kind"),
                                     std::pair("\x02\x01\x8b\x67\xc8\xbc", "format")}) {
    const Status why = DecodeRecord(std::string_view(record, 6)).error();
    EXPECT_EQ(why.reason(), Reason::kJournalFailed);
    EXPECT_THAT(why.ToString(), HasSubstr(std::string("unknown ") + what + ": a newer version"));
  }
}

TEST(JournalWire, RefusesEveryFlippedBitAndEveryCut) {
  const std::string bytes =
      EncodeRecord(coordinator::CommitRecord{Epoch(9), Version(7), {"engine-a", "engine-b"}});
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_EQ(DecodeRecord(damaged).error().code(), Code::kDataLoss) << "bit " << bit;
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(DecodeRecord(bytes.substr(0, size))) << "size " << size;
  }
}

}  // namespace
}  // namespace weightwire::wire
