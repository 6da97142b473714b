#include <sys/mman.h>
#include <unistd.h>

#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

class AgentMemory : public AgentTest {
 protected:
  AgentMemory() {
    Start();
    trainer_ = Attach(RequestFor(control::GroupRole::kTrainer, "trainer"));
  }
  Status ImportFd(int fd, uint64_t bytes) {
    auto region = agent->ImportMemory(trainer_->handle, memory::UniqueFd(fd), bytes);
    return region ? OkStatus() : region.error();
  }
  std::unique_ptr<Rank> trainer_;
};

TEST_F(AgentMemory, RefusesAnUnsealedMemfd) {
  const int fd = memfd_create("unsealed", MFD_ALLOW_SEALING | MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, 128), 0);
  ExpectStatus(ImportFd(fd, 128), Code::kInvalidArgument, Reason::kMemoryNotSealed);
}

TEST_F(AgentMemory, RefusesAMemfdThatIsTooSmall) {
  auto region = MakeRegion(128);
  ExpectStatus(ImportFd(fcntl(region->fd(), F_DUPFD_CLOEXEC, 0), 129), Code::kInvalidArgument,
               Reason::kMemoryTooSmall);
}

TEST_F(AgentMemory, RefusesWhatIsNoMemfd) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[1]);
  ExpectStatus(ImportFd(ends[0], 128), Code::kInvalidArgument, Reason::kMemoryInvalid);
}

TEST_F(AgentMemory, RefusesMoreRegionsThanItsLimitUntilABindingLetsSomeGo) {
  options.imported_regions_max = 2;
  Start();
  auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0, 2));
  ASSERT_TRUE(Submit(trainer->handle).ok());
  auto region = MakeRegion();
  ASSERT_TRUE(Import(trainer->handle, *region).has_value());
  const uint64_t used = Import(trainer->handle, *region).value();
  ExpectStatus(Import(trainer->handle, *region).error(), Code::kResourceExhausted,
               Reason::kLimitExceeded);
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 256);
  ASSERT_TRUE(agent->Bind(trainer->handle, {{0, used, 0}, {1, used, 64}}).ok());
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 128);
  EXPECT_TRUE(Import(trainer->handle, *region).has_value());
  agent->Detach(trainer->handle, OkStatus());
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 0);
  auto next = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", 0, 3));
  EXPECT_TRUE(Import(next->handle, *region).has_value());
  EXPECT_TRUE(Import(next->handle, *region).has_value());
}

TEST_F(AgentMemory, RefusesToBindBeforeALayoutIsAgreed) {
  ExpectStatus(agent->Bind(trainer_->handle, {}), Code::kFailedPrecondition, Reason::kNotReady);
}

TEST_F(AgentMemory, RefusesEveryBadBindingAndNamesTheTensor) {
  ASSERT_TRUE(Submit(trainer_->handle).ok());
  auto region = MakeRegion(128);
  const uint64_t id = Import(trainer_->handle, *region).value();
  struct Case {
    std::vector<TensorBinding> bindings;
    Reason reason;
    std::string tensor;
  };
  const std::vector<Case> cases = {
      {{{0, id, 0}, {1, id + 1000, 64}}, Reason::kMemoryInvalid, "b"},
      {{{0, id, 0}, {1, id, 119}}, Reason::kMemoryInvalid, "b"},  // splits an element
      {{{0, id, 0}, {1, id, 120}}, Reason::kMemoryTooSmall, "b"},
      {{{0, id, 128}, {1, id, 64}}, Reason::kMemoryTooSmall, "a"},
      {{{0, id, UINT64_MAX - 3}, {1, id, 64}}, Reason::kMemoryTooSmall, "a"},
      {{{0, id, 0}}, Reason::kTensorMissing, "b"},
      {{}, Reason::kTensorMissing, "a"},
      {{{0, id, 0}, {0, id, 0}, {1, id, 64}}, Reason::kMemoryInvalid, ""},
      {{{0, id, 0}, {1, id, 64}, {2, id, 64}}, Reason::kMemoryInvalid, ""},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    Status status = agent->Bind(trainer_->handle, cases[i].bindings);
    ExpectStatus(status, Code::kInvalidArgument, cases[i].reason);
    EXPECT_EQ(status.tensor(), cases[i].tensor);
    ExpectStatus(Publish(*trainer_, 1), Code::kFailedPrecondition, Reason::kNotReady);
  }
  EXPECT_TRUE(agent->Bind(trainer_->handle, {{1, id, 118}, {0, id, 0}}).ok());
}

TEST_F(AgentMemory, KeepsTheOldBindingWhenTheNewOneIsRefused) {
  ASSERT_TRUE(Submit(trainer_->handle).ok());
  auto region = MakeRegion(128);
  const uint64_t id = Import(trainer_->handle, *region).value();
  ASSERT_TRUE(agent->Bind(trainer_->handle, {{0, id, 0}, {1, id, 64}}).ok());
  ASSERT_FALSE(agent->Bind(trainer_->handle, {{0, id, 0}}).ok());
  EXPECT_TRUE(Publish(*trainer_, 1).ok());
}

TEST_F(AgentMemory, BindsTheTrainersOwnBytes) {
  auto trainer = BoundTrainer(0, 5);
  std::memset(parameters->data(), 0x5a, 128);
  ASSERT_TRUE(Publish(*trainer, 1).ok());
  Command(SourcePrepare(*trainer, 1, 1));
  Command(epoch::TransferCommand{Epoch{1}, trainer->member});
  const auto& binding = engine.sources.at(JobOf(*trainer, 1)).first.binding;
  ASSERT_EQ(binding.size(), 2u);
  EXPECT_EQ(binding[0].bytes, 48u);
  EXPECT_EQ(binding[1].bytes, 10u);
  EXPECT_EQ(binding[1].offset, 64u);
  EXPECT_EQ(binding[1].data()[0], std::byte{0x5a}) << "the same memory, not a copy";
}

TEST_F(AgentMemory, RefusesARebindWhileAVersionIsHeld) {
  auto trainer = BoundTrainer(0, 5);
  const uint64_t id = Import(trainer->handle, *parameters).value();
  ASSERT_TRUE(Publish(*trainer, 1).ok());
  ExpectStatus(agent->Bind(trainer->handle, {{0, id, 0}, {1, id, 64}}), Code::kFailedPrecondition,
               Reason::kNotReady);
  Source(*trainer, 1, 1);
  Release(*trainer, 1, 1);
  EXPECT_TRUE(agent->Bind(trainer->handle, {{0, id, 0}, {1, id, 64}}).ok());
}

TEST_F(AgentMemory, MakesTheStageOnceAndWithinTheBudget) {
  auto rollout = StagedEngine();
  auto stage = agent->OpenStage(rollout->handle);
  ASSERT_TRUE(stage.has_value());
  EXPECT_EQ(stage->arena.offsets, (std::vector<uint64_t>{0, 64}));
  EXPECT_EQ(stage->arena.bytes_total, 74u);
  EXPECT_NE(stage->buffers[0]->id(), stage->buffers[1]->id());
  auto again = agent->OpenStage(rollout->handle);
  EXPECT_EQ(again->buffers[0], stage->buffers[0]);
  EXPECT_EQ(sink.gauges["staging_bytes"], 148);
  EXPECT_EQ(sink.gauges["registered_memory_bytes"], 148);
  EXPECT_EQ(agent->Local()[1].stage_bytes, 148u);
  agent->Detach(rollout->handle, OkStatus());
  EXPECT_EQ(sink.gauges["staging_bytes"], 0);
}

TEST_F(AgentMemory, RefusesAStageBeyondTheBudgetAndTellsNeedAndBudget) {
  options.stage_bytes_max = 147 + 148;
  Start();
  auto first = StagedEngine(0, 2);
  auto second = StagedEngine(1, 2);
  Status status = agent->OpenStage(second->handle).error();
  ExpectStatus(status, Code::kResourceExhausted, Reason::kLimitExceeded);
  EXPECT_THAT(status.message(), HasSubstr("148"));
  EXPECT_THAT(status.message(), HasSubstr("295"));
  agent->Detach(first->handle, OkStatus());
  ExpectStatus(agent->OpenStage(second->handle).error(), Code::kUnavailable, Reason::kNotReady);
  sim.RunReady();
  EXPECT_TRUE(agent->OpenStage(second->handle).has_value());
}

TEST_F(AgentMemory, RefusesAStageWithoutALayout) {
  auto rollout = Attach(RequestFor(control::GroupRole::kEngine, "engine-a"));
  ExpectStatus(agent->OpenStage(rollout->handle).error(), Code::kFailedPrecondition,
               Reason::kNotReady);
}

TEST_F(AgentMemory, RefusesCallsOfTheOtherRole) {
  auto rollout = StagedEngine();
  const auto wrong = [&](const Status& status) {
    ExpectStatus(status, Code::kInvalidArgument, Reason::kInvalidRequest);
  };
  wrong(agent->OpenStage(trainer_->handle).error());
  wrong(agent->AcknowledgeSwap(trainer_->handle, Epoch{1}, 0));
  wrong(agent->Bind(rollout->handle, {}));
  wrong(Publish(*rollout, 1));
  auto region = MakeRegion();
  wrong(Import(rollout->handle, *region).error());
}

}  // namespace
}  // namespace weightwire::agent
