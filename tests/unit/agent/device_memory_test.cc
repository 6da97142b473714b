// Ranks whose memory is to lie on a GPU.
#include "tests/support/fake_cuda/fake_gpus.h"
#include "tests/unit/agent/agent_fixture.h"

namespace weightwire::agent {
namespace {

using weightwire::testing::FakeDevice;

class AgentDevice : public AgentTest {
 protected:
  AgentDevice() {
    gpu_pools_ = memory::GpuMemoryPool::Make(FakeDevice(0), 4'096).value();
    options.gpu_pools.by_device.emplace(FakeDevice(0)->uuid(), gpu_pools_);
  }
  AttachRequest OnGpu(control::GroupRole role, const std::string& group,
                      const device::Uuid& uuid = FakeDevice(0)->uuid()) {
    AttachRequest request = RequestFor(role, group);
    request.device = uuid;
    return request;
  }
  /// A trainer whose tensors lie in a GPU pool that is filled with `value`.
  std::unique_ptr<Rank> BoundOnGpu(std::byte value) {
    auto trainer = Attach(OnGpu(control::GroupRole::kTrainer, "trainer"));
    EXPECT_TRUE(Submit(trainer->handle).ok());
    const GpuAllocation gpu_pool = agent->AllocateGpuMemory(trainer->handle, 128).value();
    const std::vector<std::byte> content(128, value);
    EXPECT_TRUE(device::CopyRun(gpu_pool.memory->bytes(), content.data(), 128).ok());
    EXPECT_TRUE(
        agent->Bind(trainer->handle, {{0, gpu_pool.region, 0}, {1, gpu_pool.region, 64}}).ok());
    return trainer;
  }
  std::shared_ptr<memory::GpuMemoryPool> gpu_pools_;
};

TEST_F(AgentDevice, LendsATrainerASlabAndBindsItsTensorsThere) {
  Start();
  auto trainer = BoundOnGpu(std::byte{5});
  EXPECT_EQ(gpu_pools_->bytes_used(), 512u);
  ASSERT_TRUE(Publish(*trainer, 1).ok());
  Command(SourcePrepare(*trainer, 1, 1));
  Command(epoch::TransferCommand{Epoch{1}, trainer->member});
  const auto& binding = engine.sources.at(JobOf(*trainer, 1)).first.binding;
  ASSERT_EQ(binding.size(), 2u);
  for (const auto& tensor : binding) EXPECT_TRUE(tensor.region->on_device());
  EXPECT_EQ(binding[1].at().at, binding[0].at().at + 64);
}

TEST_F(AgentDevice, TakesASlabBackWhenItsRankHasLeft) {
  Start();
  auto trainer = BoundOnGpu(std::byte{5});
  ASSERT_TRUE(agent->AllocateGpuMemory(trainer->handle, 512).has_value());
  EXPECT_EQ(gpu_pools_->bytes_used(), 1'024u);
  agent->Detach(trainer->handle, OkStatus());
  EXPECT_EQ(gpu_pools_->bytes_used(), 0u);
}

TEST_F(AgentDevice, LetsASlabGoThatABindingDoesNotUse) {
  Start();
  auto trainer = BoundOnGpu(std::byte{5});
  const uint64_t other = agent->AllocateGpuMemory(trainer->handle, 128).value().region;
  EXPECT_EQ(gpu_pools_->bytes_used(), 1'024u);
  ASSERT_TRUE(agent->Bind(trainer->handle, {{0, other, 0}, {1, other, 64}}).ok());
  EXPECT_EQ(gpu_pools_->bytes_used(), 512u);
}

TEST_F(AgentDevice, RefusesABindingThatLeavesItsSlabOrAnothersSlab) {
  Start();
  auto trainer = BoundOnGpu(std::byte{5});
  const uint64_t own = agent->AllocateGpuMemory(trainer->handle, 73).value().region;
  ExpectStatus(agent->Bind(trainer->handle, {{0, own, 0}, {1, own, 64}}), Code::kInvalidArgument,
               Reason::kMemoryTooSmall);
  AttachRequest request = OnGpu(control::GroupRole::kTrainer, "trainer");
  request.rank = 1;
  request.world_size = 2;
  auto second = Attach(request);
  ASSERT_TRUE(Submit(second->handle).ok());
  ExpectStatus(agent->Bind(second->handle, {{0, own, 0}, {1, own, 0}}), Code::kInvalidArgument,
               Reason::kMemoryInvalid);
}

TEST_F(AgentDevice, RefusesASlabThatDoesNotFitAndOneForARankWithoutADevice) {
  Start();
  auto trainer = BoundOnGpu(std::byte{5});
  const auto large = agent->AllocateGpuMemory(trainer->handle, 4'000);
  ASSERT_FALSE(large.has_value());
  ExpectStatus(large.error(), Code::kResourceExhausted, Reason::kLimitExceeded);
  EXPECT_EQ(large.error().rank(), "trainer/0");
  EXPECT_THAT(large.error().message(), HasSubstr(FakeDevice(0)->name()));
  auto plain = Attach(RequestFor(control::GroupRole::kTrainer, "other", 0, 2));
  ExpectStatus(agent->AllocateGpuMemory(plain->handle, 1).error(), Code::kFailedPrecondition,
               Reason::kNotReady);
  auto engine_rank = Attach(OnGpu(control::GroupRole::kEngine, "engine-a"));
  ExpectStatus(agent->AllocateGpuMemory(engine_rank->handle, 1).error(), Code::kInvalidArgument,
               Reason::kInvalidRequest);
}

TEST_F(AgentDevice, MakesAStageThereOutsideOfTheHostsBudget) {
  options.stage_bytes_max = 1;
  Start();
  auto rollout = Attach(OnGpu(control::GroupRole::kEngine, "engine-a"));
  ASSERT_TRUE(Submit(rollout->handle).ok());
  const StageInfo stage = agent->OpenStage(rollout->handle).value();
  ASSERT_EQ(stage.buffers.size(), 2u);
  for (const auto& buffer : stage.buffers) EXPECT_TRUE(buffer->on_device());
  EXPECT_EQ(gpu_pools_->bytes_used(), 1'024u);
  EXPECT_EQ(agent->Local()[0].stage_bytes, 148u);
}

TEST_F(AgentDevice, SaysWhyARankGetsHostMemoryInstead) {
  Start();
  FakeApplication application;
  const auto reply = TryAttach(
      OnGpu(control::GroupRole::kEngine, "engine-a", FakeDevice(1)->uuid()), &application);
  ASSERT_TRUE(reply.has_value());
  ExpectStatus(reply->device, Code::kFailedPrecondition, Reason::kConfigInvalid);
  EXPECT_THAT(reply->device.message(), HasSubstr(FakeDevice(1)->name()));
  ASSERT_TRUE(Submit(reply->handle).ok());
  EXPECT_FALSE(agent->OpenStage(reply->handle).value().buffers[0]->on_device());
}

TEST_F(AgentDevice, RefusesARankWhoseRequiredDeviceIsNotThere) {
  options.gpu_pools.required = true;
  Start();
  FakeApplication application;
  const auto reply = TryAttach(
      OnGpu(control::GroupRole::kTrainer, "trainer", FakeDevice(1)->uuid()), &application);
  ASSERT_FALSE(reply.has_value());
  ExpectStatus(reply.error(), Code::kFailedPrecondition, Reason::kConfigInvalid);
  EXPECT_TRUE(
      TryAttach(RequestFor(control::GroupRole::kTrainer, "trainer"), &application).has_value());
}

TEST_F(AgentDevice, BringsASnapshotToTheHost) {
  Start();
  auto trainer = BoundOnGpu(std::byte{6});
  ASSERT_TRUE(Publish(*trainer, 1, PublishMode::kSnapshot).ok());
  EXPECT_THAT(trainer->application.told, ElementsAre("released v1 e0"));
  Command(SourcePrepare(*trainer, 1, 1));
  Command(epoch::TransferCommand{Epoch{1}, trainer->member});
  for (const auto& tensor : engine.sources.at(JobOf(*trainer, 1)).first.binding) {
    for (uint64_t i = 0; i < tensor.bytes; ++i) ASSERT_EQ(tensor.data()[i], std::byte{6});
  }
}

TEST_F(AgentDevice, NobodyReadsASnapshotThatTheGpuFailedToGive) {
  Start();
  auto trainer = BoundOnGpu(std::byte{6});
  FAKE_CALL(fake_cuda_fail)("ww_cuda_copy_bytes", 1);
  ASSERT_TRUE(Publish(*trainer, 1, PublishMode::kSnapshot).ok());
  EXPECT_THAT(trainer->application.told, IsEmpty());
  Command(SourcePrepare(*trainer, 1, 1));
  EXPECT_THAT(coordinator.All<epoch::PreparedReport>(), IsEmpty());
  const auto failed = coordinator.All<epoch::FailedReport>();
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].why.rank(), "trainer/0");
  EXPECT_THAT(failed[0].why.message(), HasSubstr(FakeDevice(0)->name()));
}

}  // namespace
}  // namespace weightwire::agent
