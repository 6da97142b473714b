// What goes wrong ends every call once and in time, frees the buffers, and leaves members that form
// again under the next epoch.
#include <thread>

#include "tests/unit/collective/members.h"

namespace weightwire::collective {
namespace {

class Faults : public Members {
 protected:
  void ExpectUnformed(const std::vector<Status>& results, Code code) {
    for (uint32_t rank = 0; rank < size(); ++rank) {
      EXPECT_EQ(results[rank].code(), code) << rank << ": " << results[rank].ToString();
      EXPECT_EQ(members_[rank]->state(), State::kUnformed) << rank;
    }
    EXPECT_EQ(fake_nccl_live_comms(), 0);
    EXPECT_EQ(fake_nccl_live_events(), 0);
  }
  void FormsAgain(uint64_t epoch) {
    fake_nccl_reset();
    FormWell(epoch);
    BroadcastWell(0, 77);
  }
};

TEST_F(Faults, HangAtInitEndsAtTheDeadline) {
  Open(3);
  fake_nccl_fault(1, FAKE_NCCL_HANG_INIT);
  const auto results = Form(1, kShort);
  ExpectUnformed(results, Code::kDeadlineExceeded);
  EXPECT_EQ(results[2].message(), "forming did not end in time in communicator epoch 1");
  EXPECT_EQ(results[2].rank(), "2 of 3");
  FormsAgain(2);
}

TEST_F(Faults, MemberThatNeverComesEndsTheOthersAtTheirDeadline) {
  Open(2);
  auto id = members_[0]->MakeUniqueId();
  EXPECT_EQ(members_[0]->Form(*id, 0, 2, 1, kShort).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(members_[0]->state(), State::kUnformed);
  FormsAgain(2);
}

TEST_F(Faults, HangInAnOperationEndsAtTheDeadlineAndBuffersAreFree) {
  Open(3);
  FormWell(1);
  fake_nccl_fault(2, FAKE_NCCL_HANG_OPERATION);
  std::vector<Bytes> data(3, Bytes(4'096, 1));
  data[0] = Pattern(4'096, 5);
  ExpectUnformed(All([&](uint32_t rank) { return Broadcast(rank, data[rank], 0, kShort); }),
                 Code::kDeadlineExceeded);
  EXPECT_EQ(data[1], Bytes(4'096, 1)) << "nothing had moved";
  FormsAgain(2);
}

// Rank 1 gives up alone; what rank 0 does later must not reach rank 1's buffer.
TEST_F(Faults, AnAbortedMembersBufferIsNotTouchedByALateRoot) {
  Open(2);
  FormWell(1);
  Bytes target(4'096, 9), source = Pattern(4'096, 6);
  EXPECT_EQ(Broadcast(1, target, 0, kShort).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Broadcast(0, source, 0, kShort).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(target, Bytes(4'096, 9));
  EXPECT_EQ(fake_nccl_pending(), 0);
  FormsAgain(2);
}

TEST_F(Faults, AsynchronousErrorOfAMemberIsToldAndTheOthersEndInTime) {
  Open(2);
  FormWell(1);
  fake_nccl_fault(1, FAKE_NCCL_ASYNC_ERROR);
  Bytes a(64), b(64);
  const Piece send{a.data(), a.size(), 1}, receive{b.data(), b.size(), 1};
  const Status sender = members_[1]->Broadcast(a.data(), a.size(), 0, StreamOf(1), kAmple);
  EXPECT_EQ(sender.code(), Code::kUnavailable) << sender.ToString();
  EXPECT_EQ(sender.message(), "broadcast: fake system error (told by the fake)");
  EXPECT_EQ(members_[0]->Exchange({{send}}, {{receive}}, StreamOf(0), kShort).code(),
            Code::kDeadlineExceeded);
  FormsAgain(2);
}

TEST_F(Faults, LostRankIsToldToItsPeersLongBeforeTheDeadline) {
  Open(3);
  FormWell(1);
  std::vector<Bytes> data(3, Bytes(64));
  auto others = std::async(std::launch::async, [&] {
    std::vector<std::future<Status>> running;
    for (uint32_t rank : {0u, 1u}) {
      running.push_back(
          std::async(std::launch::async, [&, rank] { return Broadcast(rank, data[rank], 2); }));
    }
    return std::vector<Status>{running[0].get(), running[1].get()};
  });
  while (fake_nccl_pending() < 2 * 64) std::this_thread::sleep_for(milliseconds(1));
  fake_nccl_lose(2);
  for (const Status& status : others.get()) {
    EXPECT_EQ(status.code(), Code::kAborted) << status.ToString();
    EXPECT_EQ(status.reason(), Reason::kMemberLost);
  }
  EXPECT_TRUE(members_[2]->Abort("it is started anew").ok());
  FormsAgain(2);
}

TEST_F(Faults, SizesThatDisagreeAreToldOnBothSides) {
  Open(2);
  auto id = members_[0]->MakeUniqueId();
  ExpectUnformed(
      All([&](uint32_t rank) { return members_[rank]->Form(*id, rank, 2 + rank, 1, kAmple); }),
      Code::kInvalidArgument);
  FormWell(2);
  std::vector<Bytes> data{Bytes(10), Bytes(11)};
  ExpectUnformed(All([&](uint32_t rank) { return Broadcast(rank, data[rank], 0); }),
                 Code::kInvalidArgument);
  FormsAgain(3);
}

TEST_F(Faults, StaleUniqueIdFormsNothing) {
  Open(2);
  auto id = members_[0]->MakeUniqueId();
  for (const Status& status :
       All([&](uint32_t rank) { return members_[rank]->Form(*id, rank, 2, 1, kAmple); })) {
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
  for (auto& member : members_) EXPECT_TRUE(member->Abort("a test").ok());
  ExpectUnformed(All([&](uint32_t rank) { return members_[rank]->Form(*id, rank, 2, 2, kAmple); }),
                 Code::kInvalidArgument);
  FormsAgain(3);
}

TEST_F(Faults, AbortFromAnotherThreadEndsWhatRunsWithItsReason) {
  Open(2);
  FormWell(1);
  Bytes data(64);
  auto running = std::async(std::launch::async, [&] { return Broadcast(1, data, 0); });
  while (fake_nccl_pending() == 0) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(members_[1]->Abort("the epoch is over").ok());
  const Status status = running.get();
  EXPECT_EQ(status.reason(), Reason::kAbortRequested);
  EXPECT_EQ(status.message(), "aborted: the epoch is over");
  EXPECT_TRUE(members_[0]->Abort("the epoch is over").ok());
  FormsAgain(2);
}

TEST_F(Faults, AbortDuringFormingEndsIt) {
  Open(2);
  auto id = members_[0]->MakeUniqueId();
  auto forming =
      std::async(std::launch::async, [&] { return members_[0]->Form(*id, 0, 2, 1, kAmple); });
  while (members_[0]->state() != State::kForming) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(members_[0]->Abort("no more").ok());
  EXPECT_EQ(forming.get().reason(), Reason::kAbortRequested);
  FormsAgain(2);
}

// What NCCL promises last is not believed either.
TEST_F(Faults, AbortThatHangsLeavesAStuckMemberThatSaysSo) {
  Open(2, kShort);
  FormWell(1);
  fake_nccl_fault(1, FAKE_NCCL_HANG_ABORT);
  Bytes data(64);
  const Status status = Broadcast(1, data, 0, kShort);
  EXPECT_EQ(status.code(), Code::kInternal);
  EXPECT_NE(status.message().find("did not let go"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("did not end in time"), std::string::npos);
  EXPECT_EQ(members_[1]->state(), State::kStuck);
  EXPECT_EQ(Broadcast(1, data, 0).reason(), Reason::kNotReady);
  EXPECT_TRUE(members_[1]->Close(kAmple).ok());
}

TEST_F(Faults, CloseThatCannotFlushAbortsAtItsDeadline) {
  Open(2);
  FormWell(1);
  fake_nccl_fault(0, FAKE_NCCL_HANG_FLUSH);
  EXPECT_EQ(members_[0]->Close(kShort).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(members_[0]->state(), State::kClosed);
  EXPECT_TRUE(members_[1]->Close(kAmple).ok());
}

// 60 rounds of random faults: every call ends, every round after it moves the right bytes.
TEST_F(Faults, RandomFaultsNeverLeaveACallOrAByteBehind) {
  std::mt19937 random(20261122);
  Open(4);
  uint64_t epoch = 0;
  for (int round = 0; round < 60; ++round) {
    SCOPED_TRACE("seed 20261122, round " + std::to_string(round));
    FormWell(++epoch);
    const int victim = static_cast<int>(random() % 4);
    const int fault = static_cast<int>(random() % 4);
    if (fault == 1) fake_nccl_fault(victim, FAKE_NCCL_HANG_OPERATION);
    if (fault == 2) fake_nccl_fault(victim, FAKE_NCCL_ASYNC_ERROR);
    if (fault == 3) fake_nccl_lose(victim);
    std::vector<Bytes> data(4, Bytes(1'000, 3));
    const auto root = static_cast<uint32_t>(random() % 4);
    data[root] = Pattern(1'000, static_cast<uint32_t>(random()));
    const auto results = All([&](uint32_t rank) {
      return Broadcast(rank, data[rank], root, fault == 0 ? kAmple : Nanos(milliseconds(20)));
    });
    for (uint32_t rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(results[rank].ok(), fault == 0) << rank << ": " << results[rank].ToString();
      EXPECT_EQ(data[rank], fault == 0 || rank == root ? data[root] : Bytes(1'000, 3)) << rank;
    }
    for (auto& member : members_) EXPECT_TRUE(member->Abort("next round").ok());
    ASSERT_EQ(fake_nccl_live_comms(), 0);
    ASSERT_EQ(fake_nccl_pending(), 0);
    fake_nccl_reset();
  }
}

}  // namespace
}  // namespace weightwire::collective
