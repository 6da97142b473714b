#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/coordinator/fleet.h"

namespace weightwire::coordinator::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Three engines that serve version 1; b has another layout than a and c.
class CoordinatorVerify : public ::testing::Test {
 protected:
  explicit CoordinatorVerify(Options options = {}) : fleet_(std::move(options)) {
    trainer_ = fleet_.Trainer(1);
    fleet_.Engine("a", 2);
    fleet_.Engine("b");
    fleet_.Engine("c", 2);
    Publish(1);
  }
  void Publish(uint64_t version) {
    fleet_.PublishAll(trainer_, version);
    fleet_.Run();
    ASSERT_EQ(fleet_.coordinator->Snapshot().committed_version, Version(version));
  }
  using Answer = std::shared_ptr<std::optional<Result<IntegrityReport>>>;
  Answer Ask(const std::string& engine = {}, Nanos span = milliseconds(100)) {
    auto answer = std::make_shared<std::optional<Result<IntegrityReport>>>();
    fleet_.coordinator->Verify(engine, seconds(30),
                               [answer](auto result) { *answer = std::move(result); });
    fleet_.Run(span);
    return answer;
  }
  IntegrityReport Verified(const std::string& engine = {}) {
    const Answer answer = Ask(engine);
    EXPECT_TRUE(answer->has_value() && (*answer)->has_value());
    return ***answer;
  }
  /// What the ranks of `engine` hold of tensor "a" (7 × 3) differs from now on.
  void Spoil(const std::string& engine, uint32_t rank) {
    fleet_.Agent(engine + "-agent").attested = [rank](epoch::HashedReport& report, uint32_t of) {
      if (of == rank) report.sums.at(0)[1] ^= 1;
    };
  }

  Fleet fleet_;
  std::vector<epoch::Member> trainer_;
};

TEST_F(CoordinatorVerify, EnginesOfEveryLayoutHaveOneRoot) {
  const IntegrityReport result = Verified();
  EXPECT_TRUE(result.equal);
  ASSERT_EQ(result.engines.size(), 3u);
  for (const EngineContent& engine : result.engines) {
    EXPECT_EQ(engine.root, result.engines[0].root);
    EXPECT_EQ(engine.content_class, result.engines[0].content_class);
    EXPECT_EQ(engine.tensors, 2u);
    EXPECT_EQ(engine.bytes, 7 * 3 * 4 + 5 * 2);
    EXPECT_EQ(engine.epoch, fleet_.coordinator->Snapshot().committed);
  }
  EXPECT_EQ(fleet_.Newest().content_root, result.engines[0].root.ToHex());
  EXPECT_EQ(fleet_.metrics.Value("content_verifications_total{outcome=equal}"), 1);
}

TEST_F(CoordinatorVerify, NamesEngineRankAndTensorOfWhatDiffersFromMost) {
  Spoil("c", 1);
  const IntegrityReport result = Verified();
  EXPECT_FALSE(result.equal);
  ASSERT_EQ(result.differences.size(), 1u);
  EXPECT_EQ(result.differences[0].engine, "c");
  EXPECT_EQ(result.differences[0].tensor, "a");
  EXPECT_THAT(result.differences[0].ranks, ElementsAre(1)) << "a has the same layout";
  EXPECT_THAT(result.differences[0].text, HasSubstr("differs from a and 1 more; held by c/1"));
  EXPECT_EQ(fleet_.Newest().content_root, "") << "a difference is nothing to go by";
  EXPECT_EQ(fleet_.metrics.Value("content_verifications_total{outcome=different}"), 1);
}

TEST_F(CoordinatorVerify, WhatWasFoundBeforeIsRight) {
  EXPECT_TRUE(Verified("b").equal);
  Spoil("a", 0);
  Spoil("c", 0);
  const IntegrityReport result = Verified();
  ASSERT_EQ(result.differences.size(), 2u) << "a and c agree, and are wrong";
  EXPECT_EQ(result.differences[0].engine, "a");
  EXPECT_EQ(result.differences[1].engine, "c");
  EXPECT_THAT(result.differences[0].text, HasSubstr("found for this epoch before"));
  EXPECT_THAT(result.differences[0].ranks, ElementsAre(0, 1)) << "all that hold some of it";
}

TEST_F(CoordinatorVerify, AnotherVersionIsNotComparedWithIt) {
  const auto first = Verified().engines[0].root;
  Publish(2);
  const IntegrityReport result = Verified();
  EXPECT_TRUE(result.equal);
  EXPECT_NE(result.engines[0].root, first);
}

TEST_F(CoordinatorVerify, WhatARankFoundInItsCopiesIsADifference) {
  fleet_.Agent("c-agent").attested = [](epoch::HashedReport& report, uint32_t rank) {
    if (rank == 1) {
      report.why = Status(Code::kAborted, Reason::kDigestMismatch, "zeros").AtTensor("norm");
    }
  };
  const IntegrityReport found = Verified();
  EXPECT_FALSE(found.equal);
  ASSERT_EQ(found.differences_total, 1u);
  EXPECT_EQ(found.differences[0].engine, "c");
  EXPECT_EQ(found.differences[0].tensor, "norm");
  EXPECT_EQ(found.differences[0].text, "zeros");
  EXPECT_TRUE(Verified("a").equal);
}

TEST_F(CoordinatorVerify, SaysWhoWasSupersededAndComparesTheOthers) {
  fleet_.Agent("b-agent").attested = [](epoch::HashedReport& report, uint32_t) {
    report.why = Status(Code::kAborted, Reason::kStaleEpoch, "superseded");
    report.sums.clear();
  };
  const IntegrityReport result = Verified();
  EXPECT_FALSE(result.equal);
  EXPECT_THAT(result.differences, IsEmpty());
  EXPECT_FALSE(result.engines[0].superseded);
  EXPECT_TRUE(result.engines[1].superseded);
  EXPECT_EQ(fleet_.metrics.Value("content_verifications_total{outcome=incomplete}"), 1);
}

TEST_F(CoordinatorVerify, EndsAtItsDeadlineAndNamesWhoIsMissing) {
  fleet_.Agent("c-agent").deaf = [](const epoch::Command& command) {
    const auto* attest = std::get_if<epoch::HashCommand>(&command);
    return attest != nullptr && attest->rank == 1;
  };
  const Answer answer = Ask({}, seconds(29));
  EXPECT_FALSE(answer->has_value());
  fleet_.Run(seconds(2));
  ASSERT_TRUE(answer->has_value() && (*answer)->has_value());
  EXPECT_TRUE((**answer)->engines[0].why.ok());
  EXPECT_EQ((**answer)->engines[2].why.reason(), Reason::kDeadlineExceeded);
  EXPECT_EQ((**answer)->engines[2].why.rank(), "c/1");
  fleet_.Agent("c-agent").deaf = nullptr;
  EXPECT_TRUE(Verified().equal) << "the next one is asked anew";
}

TEST_F(CoordinatorVerify, ALostRankEndsItsEnginesPart) {
  fleet_.Agent("c-agent").deaf = [](const epoch::Command& command) {
    return std::holds_alternative<epoch::HashCommand>(command);
  };
  const Answer answer = Ask();
  EXPECT_FALSE(answer->has_value());
  ASSERT_TRUE(fleet_.coordinator->Evict("c", "test").ok());
  fleet_.Run();
  ASSERT_TRUE(answer->has_value() && (*answer)->has_value());
  EXPECT_EQ((**answer)->engines[2].why.reason(), Reason::kMemberLost);
}

TEST_F(CoordinatorVerify, ARepeatSharesItsEndAndAnotherOneIsRefused) {
  const Answer first = Ask({}, Nanos(0));
  const Answer repeat = Ask({}, Nanos(0));
  const Answer other = Ask("a", Nanos(0));
  fleet_.Run();
  EXPECT_TRUE((*first)->has_value());
  EXPECT_TRUE((*repeat)->has_value());
  ASSERT_FALSE((*other)->has_value());
  EXPECT_EQ((*other)->error().reason(), Reason::kNotReady);
  EXPECT_EQ(fleet_.Agent("b-agent").All<epoch::HashCommand>().size(), 1u);
}

TEST_F(CoordinatorVerify, AnAgentThatCannotIsNotAsked) {
  fleet_.agent_features = 0;
  fleet_.Engine("old");
  fleet_.Run(seconds(1));
  ASSERT_EQ(fleet_.EngineNamed("old").serving, fleet_.coordinator->Snapshot().committed);
  const IntegrityReport result = Verified("old");
  EXPECT_EQ(result.engines.at(0).why.reason(), Reason::kProtocolVersion);
  EXPECT_THAT(fleet_.Agent("old-agent").All<epoch::HashCommand>(), IsEmpty());
}

TEST_F(CoordinatorVerify, RefusesNamesThatAreNotThereAndEnginesThatServeNothing) {
  EXPECT_EQ((*Ask("nobody"))->error().reason(), Reason::kNotRegistered);
  EXPECT_EQ((*Ask("trainer"))->error().reason(), Reason::kNotReady);
}

TEST_F(CoordinatorVerify, ASumTooFewIsAFailureAndAnOldAnswerIsFenced) {
  fleet_.Agent("b-agent").attested = [](epoch::HashedReport& report, uint32_t) {
    report.sums.pop_back();
  };
  EXPECT_EQ(Verified().engines.at(1).why.reason(), Reason::kInternal);
  const auto command = *fleet_.Agent("a-agent").Last<epoch::HashCommand>();
  fleet_.Agent("a-agent").Report(
      epoch::HashedReport{command.content, command.member, command.verification, {}, {}, 0});
  fleet_.Run();
  EXPECT_EQ(fleet_.metrics.Value("fenced_requests_total{cause=stale_epoch}"), 1);
}

TEST_F(CoordinatorVerify, ShutdownAnswersIt) {
  fleet_.Agent("c-agent").deaf = [](const epoch::Command&) { return true; };
  const Answer answer = Ask();
  fleet_.coordinator->Shutdown([](const Status&) {});
  fleet_.Run();
  ASSERT_TRUE(answer->has_value() && !(*answer)->has_value());
  EXPECT_EQ((*answer)->error().reason(), Reason::kShuttingDown);
}

Options Sweeping() {
  Options options;
  options.verify_every = 2;
  return options;
}
class CoordinatorSweep : public CoordinatorVerify {
 protected:
  CoordinatorSweep() : CoordinatorVerify(Sweeping()) {}
  size_t Asked() { return fleet_.Agent("b-agent").All<epoch::HashCommand>().size(); }
};

TEST_F(CoordinatorSweep, ComesAfterEverySecondVersion) {
  EXPECT_EQ(Asked(), 0u);
  Publish(2);
  EXPECT_EQ(Asked(), 1u);
  Publish(3);
  EXPECT_EQ(Asked(), 1u);
  Publish(4);
  EXPECT_EQ(Asked(), 2u);
  EXPECT_EQ(fleet_.metrics.Value("content_verifications_total{outcome=equal}"), 2);
  EXPECT_NE(fleet_.Newest().content_root, "");
}

}  // namespace
}  // namespace weightwire::coordinator::testing
