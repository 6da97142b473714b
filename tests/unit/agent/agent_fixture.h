#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit/agent/fakes.h"

namespace weightwire::agent {

inline constexpr PlanId kPlan{1, 2};
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// An agent whose coordinator and transfer engine are fakes, in one thread under virtual time.
///
/// Every rank has two tensors: "a" (F32, 4 × 3, 48 bytes) and "b" (BF16, 5, 10 bytes; at byte 64 of
/// an arena of 74). The plan kPlan moves both whole, from trainer rank 0 to engine rank 0.
class AgentTest : public ::testing::Test {
 protected:
  struct Rank {
    Handle handle{};
    epoch::Member member;
    FakeApplication application;
  };

  AgentTest() {
    options.name = "pod-1";
    options.incarnation = Incarnation{77};
    options.host = "host-1";
    options.stage_bytes_max = 4096;
    const plan::RankSlice source = SliceFor(plan::Side::kSource);
    const plan::RankSlice target = SliceFor(plan::Side::kTarget);
    coordinator.slices[{kPlan, plan::Side::kSource, 0}] = source;
    coordinator.slices[{kPlan, plan::Side::kTarget, 0}] = target;
  }

  void Start() {
    agent = Agent::Make(options, sim, sim, sim, coordinator, engine, sink);
    agent->Start();
    sim.RunReady();
  }

  static layout::RankLayout Layout() {
    layout::RankLayout rank;
    rank.tensors.push_back({"a", layout::DType::kF32, {4, 3}, {}});
    rank.tensors.push_back({"b", layout::DType::kBF16, {5}, {}});
    return rank;
  }
  static plan::RankSlice SliceFor(plan::Side side) {
    plan::Stream stream;
    stream.id = 9;
    plan::CopyOp a{0, 0, 0, layout::DType::kF32, layout::DType::kF32, {4, 3}, 0, {3, 1}, 0, {3, 1}};
    plan::CopyOp b{1, 1, 1, layout::DType::kBF16, layout::DType::kBF16, {5}, 0, {1}, 0, {1}};
    stream.ops = {a, b};
    stream.bytes = 58;
    return {kPlan, side, 0, {stream}, {"canonical.a", "canonical.b"}};
  }

  AttachRequest RequestFor(control::GroupRole role, std::string group, uint32_t rank = 0,
                           uint64_t incarnation = 1) {
    AttachRequest request;
    request.role = role;
    request.group = std::move(group);
    request.rank = rank;
    request.world_size = rank + 1;
    request.incarnation = Incarnation{incarnation};
    return request;
  }
  Result<AttachReply> TryAttach(const AttachRequest& request, Application* application) {
    std::optional<Result<AttachReply>> answer;
    agent->Attach(request, application, [&](Result<AttachReply> reply) { answer = reply; });
    sim.RunReady();
    EXPECT_TRUE(answer.has_value());
    return *answer;
  }
  std::unique_ptr<Rank> Attach(const AttachRequest& request) {
    auto rank = std::make_unique<Rank>();
    auto reply = TryAttach(request, &rank->application);
    EXPECT_TRUE(reply.has_value());
    rank->handle = reply->handle;
    rank->member = reply->member;
    return rank;
  }
  Status Submit(Handle handle, layout::RankLayout layout = Layout()) {
    control::LayoutSubmission submission;
    submission.layout = std::move(layout);
    std::optional<Status> answer;
    agent->SubmitLayout(handle, submission, [&](Result<control::LayoutReply> reply) {
      answer = reply ? OkStatus() : reply.error();
    });
    sim.RunReady();
    return answer.value_or(Status(Code::kUnknown, Reason::kInternal, "not answered"));
  }

  /// A trainer's memory: "a" at 0, "b" at 64 of one region.
  std::shared_ptr<memory::MemoryRegion> MakeRegion(uint64_t bytes = 128) {
    auto region = memory::MemoryRegion::Allocate("parameters", bytes);
    EXPECT_TRUE(region.has_value());
    return *region;
  }
  Result<uint64_t> Import(Handle handle, const memory::MemoryRegion& region) {
    return agent->ImportMemory(handle, memory::UniqueFd(fcntl(region.fd(), F_DUPFD_CLOEXEC, 0)),
                               region.size());
  }
  std::unique_ptr<Rank> BoundTrainer(uint32_t rank = 0, uint64_t incarnation = 1) {
    auto trainer = Attach(RequestFor(control::GroupRole::kTrainer, "trainer", rank, incarnation));
    BindTrainer(*trainer);
    return trainer;
  }
  void BindTrainer(const Rank& trainer) {
    EXPECT_TRUE(Submit(trainer.handle).ok());
    parameters = MakeRegion();
    const uint64_t id = Import(trainer.handle, *parameters).value();
    EXPECT_TRUE(agent->Bind(trainer.handle, {{0, id, 0}, {1, id, 64}}).ok());
  }
  std::unique_ptr<Rank> StagedEngine(uint32_t rank = 0, uint64_t incarnation = 1,
                                     uint32_t buffers = 0, bool checks_copies = false) {
    auto request = RequestFor(control::GroupRole::kEngine, "engine-a", rank, incarnation);
    request.buffers = buffers;
    request.checks_copies = checks_copies;
    auto rollout = Attach(request);
    EXPECT_TRUE(Submit(rollout->handle).ok());
    return rollout;
  }

  Status Publish(const Rank& rank, uint64_t version, PublishMode mode = PublishMode::kHold,
                 std::vector<uint32_t> unchanged = {}) {
    std::optional<Status> answer;
    PublishCall call{Version{version}, mode, false, std::chrono::seconds(60)};
    call.unchanged = std::move(unchanged);
    agent->Publish(rank.handle, call, [&](Status status) { answer = status; });
    sim.RunReady();
    return answer.value_or(Status(Code::kUnknown, Reason::kInternal, "not answered"));
  }

  epoch::PrepareCommand SourcePrepare(const Rank& rank, uint64_t epoch, uint64_t version) {
    epoch::PrepareCommand command;
    command.epoch = command.content = Epoch{epoch};
    command.version = Version{version};
    command.member = rank.member;
    command.role = epoch::Role::kSource;
    command.assignments = {{kPlan, 0, 2}};
    command.admitted = {{Ticket{5}, Incarnation{88}}};
    return command;
  }
  epoch::PrepareCommand TargetPrepare(const Rank& rank, uint64_t epoch, uint64_t version) {
    epoch::PrepareCommand command;
    command.epoch = command.content = Epoch{epoch};
    command.version = Version{version};
    command.member = rank.member;
    command.role = epoch::Role::kTarget;
    command.assignments = {{kPlan, 0, 1}};
    command.sources[0] = {AgentId{9}, Incarnation{99}, "host-9", {{"tcp", "h:1"}}, Ticket{6}};
    command.source_participants[0] = ParticipantId{900};
    return command;
  }
  epoch::PrepareCommand RollbackPrepare(const Rank& rank, uint64_t epoch, uint64_t version,
                                        uint64_t held) {
    epoch::PrepareCommand command;
    command.epoch = command.content = Epoch{epoch};
    command.kind = epoch::Kind::kRollback;
    command.version = Version{version};
    command.member = rank.member;
    command.role = epoch::Role::kTarget;
    command.held = Epoch{held};
    return command;
  }
  void Command(epoch::Command command) {
    coordinator.agent_port->OnCommand(std::move(command));
    sim.RunReady();
  }
  static FakeEngine::Name JobOf(const Rank& rank, uint64_t epoch) {
    return {Epoch{epoch}, rank.member.id};
  }
  transfer::SourceReport Sums() { return {{{kPlan, 9, 0xabc}}, 58}; }
  transfer::TargetReport Verified() {
    return {{{kPlan, 9, 0xabc}}, 58, {{"shm", 50}, {"tcp", 8}}, 1};
  }

  /// Prepare and transfer of a version that is published already, up to SourceDoneReport.
  void Source(const Rank& rank, uint64_t epoch, uint64_t version) {
    Command(SourcePrepare(rank, epoch, version));
    Command(epoch::TransferCommand{Epoch{epoch}, rank.member});
    engine.FinishSource(JobOf(rank, epoch), Sums());
  }
  void Release(const Rank& rank, uint64_t epoch, uint64_t version, Status why = OkStatus()) {
    Command(epoch::ReleaseCommand{Epoch{epoch}, Version{version}, rank.member, std::move(why)});
  }
  /// Up to StagedReport.
  void Stage(const Rank& rank, uint64_t epoch, uint64_t version) {
    Command(TargetPrepare(rank, epoch, version));
    Command(epoch::TransferCommand{Epoch{epoch}, rank.member});
    engine.FinishTarget(JobOf(rank, epoch), Verified());
  }
  void Commit(const Rank& rank, uint64_t epoch, uint64_t version, bool leader = true) {
    Command(
        epoch::CommitCommand{Epoch{epoch}, Version{version}, Epoch{epoch}, rank.member, leader});
  }
  /// Stage, commit, acknowledge, install.
  void Serve(const Rank& rank, uint64_t epoch, uint64_t version) {
    Stage(rank, epoch, version);
    Commit(rank, epoch, version);
    EXPECT_TRUE(agent->AcknowledgeSwap(rank.handle, Epoch{epoch}, 0.25).ok());
    Command(epoch::CommittedEverywhereCommand{Epoch{epoch}, rank.member});
  }

  static void ExpectStatus(const Status& status, Code code, Reason reason) {
    EXPECT_EQ(status.code(), code) << status.ToString();
    EXPECT_EQ(status.reason(), reason) << status.ToString();
  }

  GaugeSink sink;
  ::weightwire::testing::SimExecutor sim;
  FakeCoordinator coordinator{sim};
  FakeEngine engine;
  Options options;
  std::unique_ptr<Agent> agent;
  std::shared_ptr<memory::MemoryRegion> parameters;  ///< of the trainer bound last
};

}  // namespace weightwire::agent
