#include <gtest/gtest.h>

#include <vector>

#include "server/transport/proof.h"
#include "tests/unit/transfer/fleet.h"

// Peers of the version before tickets were proved.
namespace weightwire::transfer {
namespace {

using std::chrono::seconds;
using testing::Fleet;
using testing::FleetOptions;

/// Knows protocol 1 only: it refuses what asks for more, and takes the ticket that is shown.
class OlderAgent final : public transport::Handler {
 public:
  static constexpr Incarnation kSelf{77};

  explicit OlderAgent(Fleet& fleet) : fleet_(fleet) {
    transport_ = fleet.network.MakeTransport("older");
    EXPECT_TRUE(transport_->Start(this, kSelf).ok());
    for (auto& [rank, peer] : fleet.targets[0].job.sources) {
      peer.incarnation = kSelf;
      peer.addresses = {{"fake", "older"}};
    }
  }
  ~OlderAgent() override {
    transport_.reset();
    fleet_.sim.RunFor(seconds(1));
  }

  Result<Ticket> OnHello(const transport::CallerHello& said) override {
    heard.push_back(said);
    if (!said.proves()) return said.shown;
    return Fail(Code::kFailedPrecondition, Reason::kProtocolVersion, "");
  }
  void OnAccepted(std::shared_ptr<transport::Endpoint>) override { ++accepted; }
  void OnNotify(const std::shared_ptr<transport::Endpoint>&, std::span<const std::byte>) override {}
  void OnClosed(const std::shared_ptr<transport::Endpoint>&, const Status&) override {}

  std::vector<transport::CallerHello> heard;
  int accepted = 0;

 private:
  Fleet& fleet_;
  std::unique_ptr<transport::Transport> transport_;
};

FleetOptions OneStream(bool proof_required) {
  FleetOptions options;
  options.shape = {.source_ranks = 1, .target_ranks = 1};
  options.source_agents = 1;
  options.proof_required = proof_required;
  return options;
}

TEST(OlderPeer, IsShownTheTicketAfterItRefusedTheProof) {
  Fleet fleet(OneStream(false));
  OlderAgent older(fleet);
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(2));
  const Ticket ticket = fleet.targets[0].job.sources.at(0).ticket;
  ASSERT_EQ(older.heard.size(), 2u);
  EXPECT_EQ(older.heard[0].shown, transport::NameOf(ticket));
  EXPECT_EQ(older.heard[1].shown, ticket);
  EXPECT_EQ(older.accepted, 1);
}

TEST(OlderPeer, IsNotShownTheTicketWhereProofIsRequired) {
  Fleet fleet(OneStream(true));
  OlderAgent older(fleet);
  fleet.StartTarget(0);
  fleet.sim.RunFor(seconds(2));
  const Ticket ticket = fleet.targets[0].job.sources.at(0).ticket;
  ASSERT_EQ(older.heard.size(), 1u);
  EXPECT_NE(older.heard[0].shown, ticket);
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kProtocolVersion);
}

TEST(OlderPeer, IsServedOnlyWhereNoProofIsRequired) {
  for (const bool proof_required : {false, true}) {
    Fleet fleet(OneStream(proof_required));
    OlderAgent older(fleet);
    fleet.source_agents[0].engine->AdmitTicket({5}, OlderAgent::kSelf);
    auto caller = fleet.network.MakeTransport("older caller");
    ASSERT_TRUE(caller->Start(&older, OlderAgent::kSelf).ok());
    transport::Hello hello;
    hello.protocol_min = hello.protocol_max = transport::kProtocolProof - 1;
    hello.caller = OlderAgent::kSelf;
    hello.callee = fleet.source_agents[0].incarnation;
    hello.ticket = {5};
    std::optional<Reason> answer;
    caller->Connect(fleet.source_agents[0].address, hello, seconds(1), [&](auto result) {
      answer = result.has_value() ? Reason::kNone : result.error().reason();
    });
    fleet.sim.RunFor(seconds(1));
    EXPECT_EQ(answer, proof_required ? Reason::kProtocolVersion : Reason::kNone);
    caller.reset();
    fleet.sim.RunFor(seconds(1));
  }
}

}  // namespace
}  // namespace weightwire::transfer
