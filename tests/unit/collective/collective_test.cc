// A Collective over the fake while nothing goes wrong, and what it refuses.
#include "tests/unit/collective/members.h"

namespace weightwire::collective {
namespace {

TEST_F(Members, BroadcastFromEveryRootReachesEveryMember) {
  for (uint32_t size = 2; size <= 4; ++size) {
    members_.clear();
    Open(size);
    FormWell(size);
    for (uint32_t root = 0; root < size; ++root) BroadcastWell(root, 10 * size + root);
    for (const Status& status : All([&](uint32_t r) { return members_[r]->Close(kAmple); })) {
      EXPECT_TRUE(status.ok()) << status.ToString();
    }
    EXPECT_EQ(fake_nccl_live_comms(), 0);
    EXPECT_EQ(fake_nccl_live_events(), 0);
  }
}

// Everybody sends to everybody, two pieces of different sizes to each, receives listed first.
TEST_F(Members, ExchangeMovesEveryPieceWhereItBelongs) {
  constexpr uint32_t kSize = 4;
  Open(kSize);
  FormWell(1);
  auto sent = [](uint32_t from, uint32_t to, uint32_t k) {
    return Pattern(1'000 + 100 * from + 10 * to + k, 100 * from + 10 * to + k);
  };
  std::vector<std::vector<Bytes>> out(kSize), in(kSize);
  std::vector<std::vector<Piece>> sends(kSize), receives(kSize);
  for (uint32_t rank = 0; rank < kSize; ++rank) {
    for (uint32_t peer = 0; peer < kSize; ++peer) {
      for (uint32_t k = 0; k < 2 && peer != rank; ++k) {
        out[rank].push_back(sent(rank, peer, k));
        in[rank].push_back(Bytes(sent(peer, rank, k).size()));
        sends[rank].push_back({out[rank].back().data(), out[rank].back().size(), peer});
        receives[rank].push_back({in[rank].back().data(), in[rank].back().size(), peer});
      }
    }
  }
  const auto results = All([&](uint32_t rank) {
    return members_[rank]->Exchange(sends[rank], receives[rank], StreamOf(rank), kAmple);
  });
  for (uint32_t rank = 0; rank < kSize; ++rank) {
    EXPECT_TRUE(results[rank].ok()) << results[rank].ToString();
    size_t next = 0;
    for (uint32_t peer = 0; peer < kSize; ++peer) {
      for (uint32_t k = 0; k < 2 && peer != rank; ++k) {
        EXPECT_EQ(in[rank][next++], sent(peer, rank, k)) << rank << " from " << peer;
      }
    }
  }
}

TEST_F(Members, WrongArgumentsAreRefusedAndTheCommunicatorStays) {
  Open(2);
  FormWell(1);
  char byte = 0;
  Collective& member = *members_[0];
  auto refused = [&](const Status& status, const char* why) {
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
    EXPECT_EQ(status.message(), why);
    EXPECT_EQ(status.rank(), "0 of 2");
  };
  refused(member.Broadcast(&byte, 0, 0, nullptr, kAmple), "broadcast: it has no bytes");
  refused(member.Broadcast(&byte, 1, 2, nullptr, kAmple), "broadcast: there is no rank 2");
  const Piece self{&byte, 1, 0}, good{&byte, 1, 1}, empty{nullptr, 1, 1};
  refused(member.Exchange({{good, self}}, {}, nullptr, kAmple),
          "send 1: it is for this rank itself; copy instead");
  refused(member.Exchange({}, {{empty}}, nullptr, kAmple), "receive 0: it has no bytes");
  EXPECT_EQ(member.state(), State::kReady);
  BroadcastWell(0, 1);
}

TEST_F(Members, OperationsNeedACommunicatorAndStaleEpochsAreRefused) {
  Open(2);
  Bytes data(8);
  EXPECT_EQ(Broadcast(0, data, 0).reason(), Reason::kNotReady);
  auto id = members_[0]->MakeUniqueId();
  EXPECT_EQ(members_[0]->Form(*id, 2, 2, 1, kAmple).reason(), Reason::kInvalidRequest);
  FormWell(5);
  EXPECT_EQ(members_[0]->Form(*id, 0, 2, 6, kAmple).reason(), Reason::kNotReady) << "formed";
  EXPECT_TRUE(members_[0]->Abort("a test").ok());
  EXPECT_EQ(members_[0]->Form(*id, 0, 2, 5, kAmple).reason(), Reason::kStaleEpoch);
  EXPECT_EQ(members_[0]->epoch(), 5u);
  EXPECT_TRUE(members_[0]->Close(kAmple).ok());
  EXPECT_TRUE(members_[0]->Close(kAmple).ok()) << "idempotent";
  EXPECT_EQ(members_[0]->Form(*id, 0, 2, 7, kAmple).reason(), Reason::kNotReady) << "closed";
}

TEST(Libraries, MissingOnesAreNamedWithARemedy) {
  auto open = [](const char* nccl, const char* cuda) {
    auto opened = Collective::Open({nccl, cuda, 0, kAmple});
    EXPECT_FALSE(opened);
    return opened ? Status() : opened.error();
  };
  const Status nccl = open("/nowhere/libnccl.so.2", FAKE_NCCL_LIBRARY);
  EXPECT_EQ(nccl.code(), Code::kUnavailable);
  EXPECT_NE(nccl.message().find("/nowhere/libnccl.so.2"), std::string::npos);
  EXPECT_NE(nccl.remedy().find("install NCCL 2.18"), std::string::npos);
  const Status cuda = open(FAKE_NCCL_LIBRARY, "/nowhere/libweightwire_cuda.so");
  EXPECT_NE(cuda.remedy().find("libweightwire_cuda.so"), std::string::npos);
  EXPECT_EQ(open("libm.so.6", FAKE_NCCL_LIBRARY).message(),
            "libm.so.6 has no symbol ncclGetVersion");
  fake_nccl_set_version(21701);
  EXPECT_NE(open(FAKE_NCCL_LIBRARY, FAKE_NCCL_LIBRARY).message().find("is NCCL 21701"),
            std::string::npos);
  fake_nccl_reset();
}

}  // namespace
}  // namespace weightwire::collective
