#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "server/transfer/notify.h"
#include "tests/unit/transfer/fleet.h"

// A reader that speaks the protocol by hand, rightly and wrongly.
namespace weightwire::transfer {
namespace {

using std::chrono::milliseconds;
using testing::Fleet;
using testing::FleetOptions;

constexpr Incarnation kRogue(666);
const Ticket kTicket = {66};

class RogueReader final : public transport::Handler {
 public:
  explicit RogueReader(Fleet& fleet) : fleet_(fleet) {
    transport_ = fleet.network.MakeTransport("rogue");
    EXPECT_TRUE(transport_->Start(this, kRogue).ok());
    fleet.source_agents[0].engine->AdmitTicket(kTicket, kRogue);
    transport::Hello hello;
    hello.caller = kRogue;
    hello.callee = fleet.source_agents[0].incarnation;
    hello.ticket = kTicket;
    transport_->Connect(fleet.source_agents[0].address, hello, std::chrono::seconds(1),
                        [this](auto result) { endpoint_ = std::move(result).value(); });
    fleet.sim.RunFor(milliseconds(10));
  }
  ~RogueReader() override {
    endpoint_->Close();
    fleet_.sim.RunFor(milliseconds(10));
    endpoint_.reset();
    transport_.reset();
  }

  Result<Ticket> OnHello(const transport::CallerHello&) override { return Ticket{}; }
  void OnAccepted(std::shared_ptr<transport::Endpoint>) override {}
  void OnNotify(const std::shared_ptr<transport::Endpoint>&,
                std::span<const std::byte> message) override {
    heard.push_back(DecodeNotify(message).value());
  }
  void OnClosed(const std::shared_ptr<transport::Endpoint>&, const Status&) override {
    closed = true;
  }

  StreamKey Key() const {
    const SourceJob& job = fleet_.sources[0].job;
    return {job.epoch, fleet_.plan.plan.id.low, 0, job.participant, ParticipantId(6'666)};
  }
  void Send(const Notify& notify) {
    const NotifyBytes bytes = EncodeNotify(notify);
    SendBytes(bytes.span());
  }
  void SendBytes(std::span<const std::byte> bytes) {
    EXPECT_TRUE(endpoint_->Notify(bytes).ok());
    fleet_.sim.RunFor(milliseconds(10));
  }
  void Open(ParticipantId as = ParticipantId(6'666)) {
    Notify open;
    open.type = NotifyType::kOpen;
    open.key = Key();
    open.key.reader = as;
    open.plan_high = fleet_.plan.plan.id.high;
    open.segment_bytes_max = static_cast<uint64_t>(testing::SmallTuning().segment_bytes_max);
    open.slot_bytes = static_cast<uint64_t>(testing::SmallTuning().slot_bytes);
    Send(open);
  }
  void Credit(uint32_t slot) {
    Notify credit;
    credit.type = NotifyType::kCredit;
    credit.key = Key();
    credit.slot = slot;
    Send(credit);
  }
  // Reads the first bytes of an announced slot, or others.
  Status Read(const Notify& ready, uint64_t offset = 0) {
    std::optional<Status> result;
    std::array<std::byte, 8> bytes;
    endpoint_->Get(ready.memory, offset, {bytes}, std::chrono::seconds(1), nullptr,
                   [&](Status status) { result = std::move(status); });
    fleet_.sim.RunFor(std::chrono::seconds(2));
    return result.value();
  }

  std::vector<Notify> heard;
  bool closed = false;

 private:
  Fleet& fleet_;
  std::unique_ptr<transport::Transport> transport_;
  std::shared_ptr<transport::Endpoint> endpoint_;
};

FleetOptions OneStream() {
  FleetOptions options;
  options.shape = {.source_ranks = 1, .target_ranks = 1, .elements_per_op_max = 40'000};
  options.source_agents = 1;
  return options;
}

TEST(RogueReader, CannotReadASlotThatItCredited) {
  Fleet fleet(OneStream());
  RogueReader reader(fleet);
  fleet.StartSource(0);
  reader.Open();
  ASSERT_EQ(reader.heard.size(), testing::SmallTuning().window);
  const Notify first = reader.heard[0];
  ASSERT_EQ(first.type, NotifyType::kReady);
  EXPECT_TRUE(reader.Read(first).ok());
  reader.Credit(0);
  EXPECT_EQ(reader.Read(first).code(), Code::kNotFound);
  EXPECT_EQ(reader.heard.back().slot, testing::SmallTuning().window) << "the next slot was due";
}

TEST(RogueReader, CannotReadWhatADrainedSourceAnnounced) {
  Fleet fleet(OneStream());
  RogueReader reader(fleet);
  fleet.StartSource(0);
  reader.Open();
  const Notify first = reader.heard.at(0);
  fleet.DrainSource(0);
  fleet.sim.RunFor(milliseconds(10));
  EXPECT_TRUE(fleet.sources[0].drained);
  EXPECT_EQ(reader.heard.back().type, NotifyType::kFail);
  EXPECT_EQ(reader.heard.back().code, Code::kAborted);
  EXPECT_EQ(reader.Read(first).code(), Code::kNotFound);
}

TEST(RogueReader, IsDroppedWhenItCreditsWhatItDoesNotHold) {
  for (uint32_t slot : {testing::SmallTuning().window, UINT32_MAX}) {
    Fleet fleet(OneStream());
    RogueReader reader(fleet);
    fleet.StartSource(0);
    reader.Open();
    reader.Credit(slot);
    EXPECT_EQ(reader.heard.back().type, NotifyType::kFail);
    EXPECT_EQ(reader.heard.back().reason, Reason::kInvalidRequest);
    ASSERT_TRUE(fleet.sources[0].result.has_value());
    EXPECT_FALSE(fleet.sources[0].result->has_value());
  }
}

TEST(RogueReader, IsDroppedWhenItCreditsWhatItDidNotReadTheSumsOf) {
  for (const bool reads_sums : {true, false}) {
    // A tensor of its own, of which every segment's head is another one than before.
    FleetOptions options = OneStream();
    options.stream_bytes = {{100'000}};
    Fleet fleet(options);
    {
      RogueReader reader(fleet);
      fleet.StartSource(0);
      reader.Open();
      EXPECT_FALSE(reader.heard.at(0).changed) << "nothing was there before";
    }
    auto bytes = fleet.source_memory[0].Snapshot();
    for (std::byte& byte : bytes) byte ^= std::byte{1};
    fleet.source_memory[0].Write(bytes);
    testing::NextAttempt(fleet, Epoch(6));
    RogueReader reader(fleet);
    fleet.StartSource(0);
    reader.Open();
    const Notify first = reader.heard.at(0);
    ASSERT_EQ(first.type, NotifyType::kReady);
    EXPECT_TRUE(first.changed);
    EXPECT_TRUE(reader.Read(first, reads_sums ? 0 : 4'000).ok());
    reader.Credit(0);
    EXPECT_EQ(reader.heard.back().type, reads_sums ? NotifyType::kReady : NotifyType::kFail);
  }
}

TEST(RogueReader, CannotOpenTwiceNorAnotherPlanNorMore) {
  Fleet fleet(OneStream());
  RogueReader reader(fleet);
  fleet.StartSource(0);
  Notify open;
  open.type = NotifyType::kOpen;
  open.key = reader.Key();
  reader.Send(open);  // plan_high is 0
  EXPECT_EQ(reader.heard.back().reason, Reason::kNotRegistered);
  open.key.stream = 99;
  reader.Send(open);
  EXPECT_EQ(reader.heard.back().reason, Reason::kNotRegistered);
  reader.Open();
  reader.Open();
  EXPECT_EQ(reader.heard.back().reason, Reason::kDuplicateRank);
  fleet.StartTarget(0);  // one reader was planned, and it is here
  fleet.sim.RunFor(milliseconds(10));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_EQ(fleet.targets[0].result->error().reason(), Reason::kLimitExceeded);
}

Readers ReadersOf(const Fleet& fleet) {
  Readers readers;
  for (const Fleet::Target& target : fleet.targets) {
    const Incarnation caller = fleet.target_agents[target.agent].incarnation;
    readers.callers.insert(caller);
    readers.ranks[target.job.participant] = {caller, target.rank};
  }
  return readers;
}

TEST(RogueReader, CannotOpenWhatTheCoordinatorDidNotNameItFor) {
  enum class Who { kStranger, kStrangerByAnothersName, kReaderByAnothersName };
  for (const Who who : {Who::kStranger, Who::kStrangerByAnothersName, Who::kReaderByAnothersName}) {
    Fleet fleet(OneStream());
    RogueReader reader(fleet);  // a ticket of its own, of another version or job, lets it in
    fleet.sources[0].job.readers = ReadersOf(fleet);
    if (who == Who::kReaderByAnothersName) fleet.sources[0].job.readers->callers.insert(kRogue);
    fleet.StartSource(0);
    reader.Open(who == Who::kStranger ? ParticipantId(6'666) : fleet.targets[0].job.participant);
    ASSERT_EQ(reader.heard.size(), 1u);
    EXPECT_EQ(reader.heard[0].type, NotifyType::kFail);
    EXPECT_EQ(reader.heard[0].code, Code::kUnauthenticated);
    EXPECT_EQ(reader.heard[0].reason, Reason::kTicketRejected);
    EXPECT_EQ(fleet.metrics.Count("auth_failures_total{reason=stream}"), 1);
    fleet.StartTarget(0);
    fleet.sim.RunFor(std::chrono::seconds(5));
    ASSERT_TRUE(fleet.targets[0].result.has_value());
    EXPECT_TRUE(fleet.targets[0].result->has_value()) << "its place was not taken";
    EXPECT_EQ(fleet.targets[0].memory.Snapshot(), fleet.targets[0].expected);
  }
}

TEST(RogueReader, CannotOpenThePlaceOfAnotherRank) {
  Fleet fleet(OneStream());
  fleet.sources[0].job.readers = ReadersOf(fleet);
  fleet.sources[0].job.readers->ranks.at(fleet.targets[0].job.participant).rank = 1;
  fleet.StartSource(0);
  fleet.StartTarget(0);
  fleet.sim.RunFor(std::chrono::seconds(5));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  ASSERT_FALSE(fleet.targets[0].result->has_value());
  const Status& why = fleet.targets[0].result->error();
  EXPECT_EQ(why.reason(), Reason::kTicketRejected);
  EXPECT_EQ(why.rank(), "engine-0/0");
  EXPECT_EQ(why.epoch(), Epoch(5));
  EXPECT_THAT(why.message(), ::testing::HasSubstr("for epoch 5 the coordinator named other readers "
                                                  "than engine-0/0"));
}

// An older coordinator names agents only.
TEST(RogueReader, CannotOpenWhatItsAgentHasNoTicketFor) {
  Fleet fleet(OneStream());
  RogueReader reader(fleet);
  fleet.sources[0].job.readers = ReadersOf(fleet);
  fleet.sources[0].job.readers->ranks.clear();
  fleet.StartSource(0);
  reader.Open();
  EXPECT_EQ(reader.heard.back().reason, Reason::kTicketRejected);
  fleet.StartTarget(0);
  fleet.sim.RunFor(std::chrono::seconds(5));
  ASSERT_TRUE(fleet.targets[0].result.has_value());
  EXPECT_TRUE(fleet.targets[0].result->has_value());
}

TEST(RogueReader, LosesItsSessionWhenItTalksNonsense) {
  Fleet fleet(OneStream());
  RogueReader reader(fleet);
  const std::array<std::byte, 40> nonsense{};
  reader.SendBytes(nonsense);
  EXPECT_TRUE(reader.closed);
}

}  // namespace
}  // namespace weightwire::transfer
