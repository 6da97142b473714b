#include "server/coordinator/communicators.h"

#include <gtest/gtest.h>

#include "tests/support/sim_executor.h"

namespace weightwire::coordinator {
namespace {

using std::chrono::seconds;
using weightwire::testing::SimExecutor;

template <typename T>
struct Answers {
  std::vector<Result<T>> got;
  std::function<void(Result<T>)> reply() {
    return [this](Result<T> result) { got.push_back(std::move(result)); };
  }
  const Result<T>& only() const {
    EXPECT_EQ(got.size(), 1u);
    return got.front();
  }
};
using Formed = Answers<FormedCommunicator>;
using Id = Answers<std::string>;

CommunicatorMember Member(uint32_t rank, uint64_t incarnation) {
  return {"class-a", rank, Incarnation(incarnation)};
}

/// Rank r is incarnation 100 + r unless a test says otherwise.
JoinCommunicator Ask(uint32_t rank, uint32_t size, uint64_t last_epoch = 0,
                     uint64_t incarnation = 0) {
  if (incarnation == 0) incarnation = 100 + rank;
  return {Member(rank, incarnation), size, "host-" + std::to_string(incarnation),
          CommunicatorEpoch(last_epoch), seconds(10)};
}

class CommunicatorsTest : public ::testing::Test {
 protected:
  Formed& Join(const JoinCommunicator& request) {
    Formed& formed = formed_.emplace_back();
    communicators_.Join(request, formed.reply());
    sim_.RunReady();
    return formed;
  }
  CommunicatorEpoch Form(uint32_t size, uint64_t last_epoch = 0) {
    Formed* last = nullptr;
    for (uint32_t rank = 0; rank < size; ++rank) last = &Join(Ask(rank, size, last_epoch));
    EXPECT_TRUE(last->only());
    return last->only()->epoch;
  }
  Id& Await(uint32_t rank, CommunicatorEpoch epoch) {
    Id& id = ids_.emplace_back();
    communicators_.Await(Member(rank, 100 + rank), epoch, seconds(10), id.reply());
    sim_.RunReady();
    return id;
  }
  Status Offer(uint32_t rank, CommunicatorEpoch epoch, const std::string& id) {
    const Status status = communicators_.Offer(Member(rank, 100 + rank), epoch, id);
    sim_.RunReady();
    return status;
  }
  Status End(uint32_t rank, CommunicatorEpoch epoch, const std::string& why) {
    const Status status = communicators_.End(Member(rank, 100 + rank), epoch, why);
    sim_.RunReady();
    return status;
  }

  std::deque<Formed> formed_;
  std::deque<Id> ids_;
  SimExecutor sim_;
  Communicators communicators_{sim_, {.groups_max = 2, .members_max = 16}};
};

TEST_F(CommunicatorsTest, AnswersEveryRankOnceTheLastOneHasAsked) {
  Formed& two = Join(Ask(2, 3));
  Formed& zero = Join(Ask(0, 3));
  EXPECT_TRUE(two.got.empty());
  Formed& one = Join(Ask(1, 3));
  for (Formed* formed : {&zero, &one, &two}) {
    ASSERT_TRUE(formed->only());
    EXPECT_EQ(formed->only()->epoch, CommunicatorEpoch(1));
    ASSERT_EQ(formed->only()->participants.size(), 3u);
    EXPECT_EQ(formed->only()->participants[2].participant, "host-102");
    EXPECT_EQ(formed->only()->participants[1].incarnation, Incarnation(101));
  }
  EXPECT_TRUE(sim_.idle()) << "no deadline is left behind";
}

TEST_F(CommunicatorsTest, DeadlineNamesTheRanksThatDidNotAsk) {
  Formed& early = Join(Ask(1, 4));
  sim_.RunFor(seconds(4));
  Formed& late = Join(Ask(3, 4));
  sim_.RunFor(seconds(6));
  ASSERT_FALSE(early.only());
  EXPECT_EQ(early.only().error().code(), Code::kDeadlineExceeded);
  EXPECT_EQ(early.only().error().reason(), Reason::kMissingRank);
  EXPECT_EQ(early.only().error().message(), "of 4 members these have not asked: 0, 2");
  EXPECT_EQ(early.only().error().rank(), "class-a/1");
  EXPECT_TRUE(late.got.empty()) << "it has its own deadline";
  sim_.RunUntilIdle();
  EXPECT_EQ(late.only().error().message(), "of 4 members these have not asked: 0, 1, 2");
  EXPECT_EQ(Form(4), CommunicatorEpoch(1)) << "nothing of the failed round is left";
}

TEST_F(CommunicatorsTest, RepeatedJoinGetsTheSameAnswer) {
  Formed& first = Join(Ask(0, 2));
  Formed& again = Join(Ask(0, 2));
  EXPECT_EQ(first.only().error().code(), Code::kAborted);
  Join(Ask(1, 2));
  ASSERT_TRUE(again.only());
  Formed& after = Join(Ask(0, 2));
  ASSERT_TRUE(after.only());
  EXPECT_EQ(after.only()->epoch, again.only()->epoch);
  EXPECT_TRUE(Offer(0, CommunicatorEpoch(1), "id").ok()) << "the epoch is still open";
}

TEST_F(CommunicatorsTest, UniqueIdReachesThoseThatWaitAndThoseThatComeLater) {
  const CommunicatorEpoch epoch = Form(3);
  Id& early = Await(1, epoch);
  EXPECT_TRUE(early.got.empty());
  EXPECT_EQ(Offer(1, epoch, "id").reason(), Reason::kInvalidRequest) << "not rank 0";
  EXPECT_EQ(Offer(0, epoch, "").reason(), Reason::kInvalidRequest);
  EXPECT_EQ(Offer(0, epoch, std::string(1025, 'x')).reason(), Reason::kInvalidRequest);
  EXPECT_TRUE(Offer(0, epoch, "id").ok());
  EXPECT_EQ(early.only(), "id");
  EXPECT_EQ(Await(2, epoch).only(), "id");
  EXPECT_TRUE(Offer(0, epoch, "id").ok());
  EXPECT_EQ(Offer(0, epoch, "other").code(), Code::kAlreadyExists);
  EXPECT_TRUE(sim_.idle());
}

TEST_F(CommunicatorsTest, AwaitEndsAtItsDeadlineAndNamesRank0) {
  const CommunicatorEpoch epoch = Form(2);
  Id& id = Await(1, epoch);
  sim_.RunUntilIdle();
  EXPECT_EQ(sim_.Now(), seconds(10));
  EXPECT_EQ(id.only().error().code(), Code::kDeadlineExceeded);
  EXPECT_NE(id.only().error().message().find("rank 0 (host-100)"), std::string::npos);
}

TEST_F(CommunicatorsTest, EndMakesTheEpochStaleForEverybody) {
  const CommunicatorEpoch epoch = Form(3);
  Id& waiting = Await(2, epoch);
  EXPECT_TRUE(End(1, epoch, "rank 2 answers no more").ok());
  EXPECT_EQ(waiting.only().error().code(), Code::kAborted);
  EXPECT_EQ(waiting.only().error().reason(), Reason::kMemberLost);
  const Status stale = Offer(0, epoch, "id");
  EXPECT_EQ(stale.reason(), Reason::kStaleEpoch);
  EXPECT_NE(stale.message().find("class-a/1: rank 2 answers no more"), std::string::npos);
  EXPECT_EQ(Await(0, epoch).only().error().reason(), Reason::kStaleEpoch);
  EXPECT_TRUE(End(0, epoch, "me too").ok()) << "several members report one loss";
  EXPECT_EQ(End(0, CommunicatorEpoch(7), "").reason(), Reason::kStaleEpoch);
  EXPECT_EQ(Form(3, 1), CommunicatorEpoch(2));
  EXPECT_TRUE(End(2, epoch, "late news of the old epoch").ok());
  EXPECT_TRUE(Offer(0, CommunicatorEpoch(2), "id").ok()) << "the new one is still open";
}

TEST_F(CommunicatorsTest, MemberThatNamesTheOpenEpochEndsIt) {
  const CommunicatorEpoch epoch = Form(2);
  Formed& zero = Join(Ask(0, 2, epoch.value));
  EXPECT_TRUE(zero.got.empty());
  EXPECT_EQ(Await(1, epoch).only().error().reason(), Reason::kStaleEpoch);
  Join(Ask(1, 2, epoch.value));
  EXPECT_EQ(zero.only()->epoch, CommunicatorEpoch(2));
}

TEST_F(CommunicatorsTest, NewProcessReplacesALostOneAndFencesIt) {
  const CommunicatorEpoch epoch = Form(2);
  Formed& replacement = Join(Ask(1, 2, 0, 999));
  EXPECT_TRUE(replacement.got.empty());
  EXPECT_EQ(Join(Ask(1, 2, 1)).only().error().reason(), Reason::kStaleIncarnation);
  EXPECT_EQ(Offer(0, epoch, "id").reason(), Reason::kStaleEpoch);
  EXPECT_EQ(End(1, epoch, "").code(), Code::kOk) << "over already";
  Formed& zero = Join(Ask(0, 2, 1));
  ASSERT_TRUE(zero.only());
  EXPECT_EQ(zero.only()->epoch, CommunicatorEpoch(2));
  EXPECT_EQ(zero.only()->participants[1].incarnation, Incarnation(999));
  EXPECT_EQ(Await(1, CommunicatorEpoch(2)).only().error().reason(), Reason::kStaleIncarnation);
  EXPECT_EQ(End(1, CommunicatorEpoch(2), "").reason(), Reason::kStaleIncarnation);
}

TEST_F(CommunicatorsTest, TwoProcessesThatWaitAsOneRankAreRefused) {
  Formed& first = Join(Ask(1, 3));
  const Status second = Join(Ask(1, 3, 0, 999)).only().error();
  EXPECT_EQ(second.code(), Code::kAlreadyExists);
  EXPECT_EQ(second.reason(), Reason::kDuplicateRank);
  EXPECT_NE(second.message().find("host-101"), std::string::npos);
  EXPECT_TRUE(first.got.empty()) << "the first one waits on";
}

TEST_F(CommunicatorsTest, LateJoinerOfAnotherSizeIsToldToWait) {
  const CommunicatorEpoch epoch = Form(2);
  for (const JoinCommunicator& request : {Ask(2, 3), Ask(0, 3, 0, 999)}) {
    const Status late = Join(request).only().error();
    EXPECT_EQ(late.code(), Code::kFailedPrecondition);
    EXPECT_EQ(late.reason(), Reason::kNotReady);
  }
  EXPECT_TRUE(Offer(0, epoch, "id").ok()) << "the open epoch is not touched";
}

TEST_F(CommunicatorsTest, RefusesWhatDoesNotFit) {
  const auto reason = [&](const JoinCommunicator& request) {
    return Join(request).only().error().reason();
  };
  EXPECT_EQ(reason(Ask(2, 2)), Reason::kInvalidRequest);
  EXPECT_EQ(reason(Ask(0, 0)), Reason::kInvalidRequest);
  EXPECT_EQ(reason(Ask(0, 17)), Reason::kLimitExceeded);
  JoinCommunicator request = Ask(0, 2);
  request.deadline = Nanos(0);
  EXPECT_EQ(reason(request), Reason::kInvalidRequest);
  request.deadline = seconds(601);
  EXPECT_EQ(reason(request), Reason::kInvalidRequest);
  Join(Ask(0, 2));
  EXPECT_EQ(reason(Ask(1, 3)), Reason::kInvalidRequest) << "sizes differ";
}

TEST_F(CommunicatorsTest, GroupsAreBoundedAndIdleOnesMakeRoom) {
  auto in = [](JoinCommunicator request, const char* group) {
    request.member.group = group;
    return request;
  };
  Join(in(Ask(0, 1), "b"));
  Formed& waiting = Join(in(Ask(0, 2), "c"));
  EXPECT_EQ(Join(Ask(0, 1)).only().error().reason(), Reason::kLimitExceeded);
  EXPECT_TRUE(communicators_.End({"b", 0, Incarnation(100)}, CommunicatorEpoch(1), "closed").ok());
  EXPECT_TRUE(Join(Ask(0, 1)).only()) << "b is idle";
  EXPECT_TRUE(waiting.got.empty());
}

// A coordinator that was started anew knows nothing; its members do.
TEST_F(CommunicatorsTest, EpochsRiseAboveWhatAnyMemberHasSeen) {
  Join(Ask(0, 2, 0));
  EXPECT_EQ(Join(Ask(1, 2, 41)).only()->epoch, CommunicatorEpoch(42));
}

TEST_F(CommunicatorsTest, ShutdownAnswersEverythingThatWaits) {
  Form(2);
  Id& id = Await(1, CommunicatorEpoch(1));
  JoinCommunicator other = Ask(0, 2);
  other.member.group = "b";
  Formed& formed = Join(other);
  communicators_.Shutdown();
  sim_.RunUntilIdle();
  EXPECT_EQ(id.only().error().reason(), Reason::kShuttingDown);
  EXPECT_EQ(formed.only().error().reason(), Reason::kShuttingDown);
  EXPECT_EQ(Join(Ask(1, 2)).only().error().reason(), Reason::kShuttingDown);
}

}  // namespace
}  // namespace weightwire::coordinator
