#include "server/wire/addresses.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "server/wire/control.h"
#include "server/wire/limits.h"
#include "tests/unit/wire/random_domain.h"

namespace weightwire::wire {
namespace {

epoch::PrepareCommand Reads(const std::vector<epoch::PeerAddress>& peers) {
  epoch::PrepareCommand command;
  command.epoch = command.content = Epoch(3);
  command.member = {ParticipantId(1), Incarnation(2)};
  command.role = epoch::Role::kTarget;
  for (const epoch::PeerAddress& peer : peers) {
    const auto rank = static_cast<uint32_t>(command.sources.size());
    command.sources[rank] = peer;
    command.source_participants[rank] = ParticipantId(7 + rank);
  }
  return command;
}

epoch::PeerAddress Peer(uint64_t agent, const std::string& at = "10.0.0.1:5000") {
  return {AgentId(static_cast<uint32_t>(agent)),
          Incarnation(agent),
          "host-" + at,
          {{"tcp", at}, {"ucx", std::string(100, 'u')}},
          Ticket{static_cast<uint8_t>(agent)}};
}

/// One session, through real bytes.
class Session {
 public:
  Result<epoch::Command> Send(const epoch::PrepareCommand& command) {
    v1::SessionDown down = ToProto(epoch::Command(command));
    told_.Shorten(down.mutable_prepare());
    const std::string bytes = down.SerializeAsString();
    bytes_ = bytes.size();
    anew_ = down.prepare().addresses_anew();
    v1::SessionDown heard;
    EXPECT_TRUE(heard.ParseFromString(bytes));
    WW_FAIL_IF_ERROR(heard_.Complete(heard.mutable_prepare()));
    return FromProto(heard);
  }
  size_t bytes() const { return bytes_; }  ///< of the last message
  bool anew() const { return anew_; }

 private:
  AddressesTold told_;
  AddressesHeard heard_;
  size_t bytes_ = 0;
  bool anew_ = false;
};

TEST(AddressesWire, ComeBackEqualAndTravelOnce) {
  Session session;
  const auto first = Reads({Peer(1), Peer(2), Peer(1), Peer(3)});
  EXPECT_EQ(session.Send(first), epoch::Command(first));
  const size_t whole = session.bytes();
  EXPECT_LT(whole, 3 * 260u + 100) << "the third is the first one's agent";
  // The next version, with tickets of its own, and one agent more.
  auto second = Reads({Peer(3), Peer(1), Peer(2), Peer(4)});
  for (auto& [rank, peer] : second.sources) peer.ticket = Ticket{9, static_cast<uint8_t>(rank)};
  EXPECT_EQ(session.Send(second), epoch::Command(second));
  EXPECT_LT(session.bytes(), whole - 250) << "one agent of four is new";
}

TEST(AddressesWire, AreToldAgainWhenTheyChange) {
  Session session;
  for (const char* at : {"a:1", "b:1", "a:1"}) {
    for (int i = 0; i < 2; ++i) {
      const auto command = Reads({Peer(1, at), Peer(2)});
      EXPECT_EQ(session.Send(command), epoch::Command(command)) << at;
    }
  }
  const auto both = Reads({Peer(1, "a:1"), Peer(1, "c:1"), Peer(1, "a:1"), Peer(1, "a:1")});
  EXPECT_EQ(session.Send(both), epoch::Command(both));
}

TEST(AddressesWire, RandomCommandsComeBackEqual) {
  const uint64_t seed = SeedFromEnvironment();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Dice dice(seed);
  Session session;
  int prepares = 0;
  for (int i = 0; i < 20'000 && prepares < 1'000; ++i) {
    const epoch::Command command = RandomCommand(dice);
    const auto* prepare = std::get_if<epoch::PrepareCommand>(&command);
    if (prepare == nullptr) continue;
    ++prepares;
    ASSERT_EQ(session.Send(*prepare), command) << i;
  }
  EXPECT_EQ(prepares, 1'000);
}

TEST(AddressesWire, BeginAnewWhereASessionWouldRememberTooMany) {
  Session session;
  uint64_t agent = 0;
  bool anew = false;
  for (int i = 0; i < 30; ++i) {
    std::vector<epoch::PeerAddress> peers{Peer(999'999)};
    for (int n = 0; n < 100; ++n) peers.push_back(Peer(++agent));
    const auto command = Reads(peers);
    ASSERT_EQ(session.Send(command), epoch::Command(command));
    anew = anew || session.anew();
  }
  EXPECT_TRUE(anew);
}

TEST(AddressesWire, WhatWasNeverToldIsRefused) {
  v1::SessionDown down = ToProto(epoch::Command(Reads({Peer(1)})));
  AddressesTold told;
  told.Shorten(down.mutable_prepare());
  EXPECT_FALSE(down.prepare().sources().at(0).as_told());
  told.Shorten(down.mutable_prepare());
  EXPECT_TRUE(down.prepare().sources().at(0).as_told());
  AddressesHeard heard;
  const Status status = heard.Complete(down.mutable_prepare());
  EXPECT_EQ(status.reason(), Reason::kInvalidRequest);
  EXPECT_NE(status.message().find("agent 1"), std::string::npos) << status.message();
}

TEST(AddressesWire, ASessionIsNotFilledUp) {
  AddressesHeard heard;
  Status status;
  uint64_t agents = 0;
  for (; status.ok() && agents < 100'000; agents += 1'000) {
    v1::Prepare prepare;
    for (uint32_t i = 0; i < 1'000; ++i) {
      (*prepare.mutable_sources())[i].set_incarnation(1 + agents + i);
    }
    status = heard.Complete(&prepare);
  }
  EXPECT_EQ(status.reason(), Reason::kMessageTooLarge);
  EXPECT_LE(agents, kAddressesToldMax + kRanksMax + 1'000);
}

}  // namespace
}  // namespace weightwire::wire
