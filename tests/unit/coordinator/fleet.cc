#include "tests/unit/coordinator/fleet.h"

#include <algorithm>
#include <utility>

#include "kernels/keyed_sum.h"
#include "tests/support/plan_run.h"

namespace weightwire::coordinator::testing {
namespace {

constexpr Nanos kNetwork = std::chrono::microseconds(50);

/// Both ends compute it from what they have in common: the plan, the stream and the epoch's bytes.
uint64_t DigestOf(PlanId plan, uint32_t stream, Version version) {
  return plan.low * 31 + stream * 1009 + version.value * 7;
}

Options WithTickets(Options options) {
  if (options.random_ticket == nullptr) {
    options.random_ticket = [next = std::make_shared<uint32_t>(0)] {
      Ticket ticket{};
      const uint32_t number = ++*next;
      for (size_t i = 0; i < 4; ++i) ticket[i] = static_cast<uint8_t>(number >> (8 * i));
      ticket[2] = static_cast<uint8_t>(ticket[2] ^ ticket[0]);
      return ticket;
    };
  }
  return options;
}

}  // namespace

layout::CanonicalSpace SmallModel() {
  return {{{"a", layout::DType::kF32, {7, 3}}, {"b", layout::DType::kBF16, {5}}}};
}

layout::RankLayout RowShard(const layout::CanonicalSpace& model, uint32_t rank, uint32_t world) {
  layout::RankLayout shard;
  for (uint32_t index = 0; index < model.tensors.size(); ++index) {
    const layout::TensorSpec& spec = model.tensors[index];
    const int64_t rows = spec.shape[0];
    const int64_t begin = rows * rank / world;
    const int64_t end = rows * (rank + 1) / world;
    if (begin == end) continue;
    layout::LocalTensor tensor{spec.name, spec.dtype, spec.shape, {}};
    tensor.shape[0] = end - begin;
    layout::Piece piece;
    piece.tensor = index;
    piece.box.begin.assign(spec.shape.size(), 0);
    piece.box.begin[0] = begin;
    piece.box.extent = tensor.shape;
    piece.local_stride.assign(spec.shape.size(), 1);
    if (spec.shape.size() == 2) piece.local_stride[0] = spec.shape[1];
    tensor.pieces.push_back(piece);
    shard.tensors.push_back(tensor);
  }
  return shard;
}

// ---- agent ----

Result<control::AgentWelcome> FakeAgent::Open(bool heartbeats) {
  if (incarnation == Incarnation{}) incarnation = Incarnation(fleet_.next_incarnation++);
  control::AgentHello hello;
  hello.job = "default";
  hello.name = name_;
  hello.incarnation = incarnation;
  hello.host = "host-of-" + name_;
  hello.addresses = {{"tcp", name_ + ":1"}};
  hello.features = fleet_.agent_features;
  std::optional<Result<control::AgentWelcome>> answer;
  fleet_.coordinator->OpenSession(hello, this, [&](auto result) { answer = std::move(result); });
  fleet_.sim.RunReady();
  EXPECT_TRUE(answer.has_value());
  if (!*answer) return *answer;
  id_ = (*answer)->agent;
  session_lost.reset();
  if (heartbeats && !beating_) {
    beating_ = true;
    Beat();
  }
  return *answer;
}

void FakeAgent::Beat() {
  if (!beating_) return;
  fleet_.coordinator->Heartbeat(id_, {troubles, receiving});
  fleet_.sim.PostAfter(fleet_.options.heartbeat, [this] { Beat(); });
}

void FakeAgent::OnSessionLost(Status why) {
  EXPECT_FALSE(session_lost.has_value()) << "a session ends once";
  session_lost = std::move(why);
  beating_ = false;
}

void FakeAgent::OnCommand(epoch::Command command) {
  EXPECT_FALSE(session_lost.has_value()) << "nothing follows the end of a session";
  commands.push_back(command);
  fleet_.trace.push_back(name_ + " " + std::to_string(command.index()) + " " +
                         std::to_string(fleet_.sim.Now().count()));
  if (const auto* prepare = std::get_if<epoch::PrepareCommand>(&command)) {
    prepared_[prepare->member] = *prepare;
  }
  if (const auto* commit = std::get_if<epoch::CommitCommand>(&command)) {
    committed_[commit->member] = {commit->content, commit->version};
  }
  if (deaf && deaf(command)) return;
  std::visit([this](const auto& c) { Answer(c); }, command);
}

void FakeAgent::Report(epoch::Report report) {
  fleet_.sim.PostAfter(kNetwork, [this, id = id_, report = std::move(report)] {
    fleet_.coordinator->Report(id, report);
  });
}

void FakeAgent::Answer(const epoch::PrepareCommand& command) {
  Report(epoch::PreparedReport{command.epoch, command.member, HeldBeyond(command.member)});
}

epoch::Contents FakeAgent::HeldBeyond(const epoch::Member& member) {
  epoch::Contents held = held_[member];
  if (!held.empty() && held.size() == retain) held.pop_back();
  return held;
}

/// Sums of numbers that stand for elements: of the version, the tensor and the place in it.
void FakeAgent::Answer(const epoch::HashCommand& command) {
  const Version version = serves[command.member].version;
  fleet_.coordinator->FetchSlice(
      command.reading, plan::Side::kSource, command.rank,
      [this, command, version](const Result<std::shared_ptr<const plan::RankSlice>>& slice) {
        EXPECT_TRUE(slice.has_value());
        epoch::HashedReport report{
            command.content, command.member, command.verification, {}, {}, 0.5};
        for (const plan::Stream& stream : (*slice)->streams) {
          for (const plan::CopyOp& op : stream.ops) {
            std::array<uint64_t, 2>& sum = report.sums.emplace_back();
            weightwire::testing::ForEachIndex(op.extent, [&](const std::vector<int64_t>& index) {
              const uint64_t place =
                  weightwire::testing::StridedAt(op.target_offset, op.target_stride, index);
              for (uint64_t lane : {0, 1}) {
                sum[lane] += kernels::Mix(version.value * 1000 + op.canonical * 100 + place + lane);
              }
            });
          }
        }
        if (attested) attested(report, command.rank);
        Report(std::move(report));
      });
}

void FakeAgent::Answer(const epoch::TransferCommand& command) {
  const epoch::PrepareCommand& prepare = prepared_.at(command.member);
  const bool source = prepare.role == epoch::Role::kSource;
  std::vector<epoch::Digest> digests;
  int64_t bytes = 0;
  for (const epoch::PlanAssignment& assignment : prepare.assignments) {
    const auto plan = fleet_.coordinator->FindPlan(assignment.plan);
    EXPECT_TRUE(plan.has_value());
    for (const plan::Stream& stream : (*plan)->streams) {
      if ((source ? stream.source_rank : stream.target_rank) != assignment.rank) continue;
      digests.push_back(
          {assignment.plan, stream.id, DigestOf(assignment.plan, stream.id, prepare.version)});
      bytes += stream.bytes;
      EXPECT_TRUE(source || prepare.sources.contains(stream.source_rank));
    }
  }
  if (source) return Report(epoch::SourceDoneReport{command.epoch, command.member, digests});
  if (corrupt && !digests.empty()) digests[0].digest ^= 1;
  epoch::StagedReport staged;
  staged.epoch = command.epoch;
  staged.member = command.member;
  staged.digests = digests;
  staged.bytes = bytes;
  staged.bytes_by_transport = {{"tcp", bytes}};
  epoch::Contents& held = held_[command.member];
  if (prepare.kind != epoch::Kind::kRollback) held = HeldBeyond(command.member);
  epoch::Contents& keeps = keeps_[command.member];
  keeps = held;
  std::erase_if(keeps, [&](const epoch::Content& c) { return c.epoch == prepare.held; });
  const epoch::Content& now = serves[command.member];
  if (retain > 0 && now.epoch != Epoch{}) keeps.insert(keeps.begin(), now);
  staged.keeps = keeps;
  if (reads_from != ParticipantId{}) {
    const auto bytes_read = static_cast<int64_t>(command.epoch.value);
    staged.spans = {{"stage", 0, 500'000, bytes_read, {}, ""},
                    {"read", 0, 500'000, bytes_read, reads_from, "tcp"}};
  }
  Report(staged);
}

void FakeAgent::Answer(const epoch::CommitCommand& command) {
  EXPECT_TRUE(fleet_.journal.Committed(command.content)) << "I2";
  if (command.leader) Report(epoch::SwappedReport{command.epoch, command.member, 0.25});
}

void FakeAgent::Answer(const epoch::AbortCommand& command) {
  Report(epoch::DrainedReport{command.epoch, command.member});
}

// ---- fleet ----

Fleet::Fleet(Options wanted) : options(WithTickets(std::move(wanted))) { Restart(); }
Fleet::~Fleet() = default;

void Fleet::Restart() {
  coordinator.reset();
  journal.Crash(0);
  auto made = Coordinator::Make(options, sim, sim, sim, journal, metrics);
  EXPECT_TRUE(made.has_value());
  coordinator = std::move(*made);
  for (auto& [name, agent] : agents) agent->StopHeartbeats();
  Run();
}

FakeAgent& Fleet::Agent(const std::string& name) {
  auto& agent = agents[name];
  if (agent == nullptr) {
    agent = std::make_unique<FakeAgent>(*this, name);
    EXPECT_TRUE(agent->Open().has_value());
  }
  return *agent;
}

Result<epoch::Member> Fleet::Register(const std::string& agent, control::GroupRole role,
                                      const std::string& group, uint32_t rank, uint32_t world,
                                      uint64_t incarnation, const control::RejoinState& claim) {
  control::RegisterRequest request;
  request.agent = Agent(agent).id();
  request.job = "default";
  request.role = role;
  request.group = group;
  request.rank = rank;
  request.world_size = world;
  request.incarnation = Incarnation(incarnation == 0 ? next_incarnation++ : incarnation);
  request.pid = 4242;
  request.claim = claim;
  std::optional<Result<control::RegisterReply>> answer;
  coordinator->Register(request, [&](auto result) { answer = std::move(result); });
  sim.RunReady();
  EXPECT_TRUE(answer.has_value());
  if (!*answer) return Fail(answer->error());
  return (*answer)->member;
}

Result<control::LayoutReply> Fleet::Submit(control::LayoutSubmission submission) {
  std::optional<Result<control::LayoutReply>> answer;
  coordinator->SubmitLayout(std::move(submission),
                            [&](auto result) { answer = std::move(result); });
  sim.RunReady();
  EXPECT_TRUE(answer.has_value());
  return *answer;
}

Status Fleet::SubmitRows(const epoch::Member& member, uint32_t rank, uint32_t world) {
  control::LayoutSubmission submission;
  submission.member = member;
  submission.canonical = SmallModel();
  submission.layout = RowShard(SmallModel(), rank, world);
  const auto reply = Submit(submission);
  return reply ? OkStatus() : reply.error();
}

std::vector<epoch::Member> Fleet::Join(control::GroupRole role, const std::string& group,
                                       uint32_t world, std::string agent) {
  if (agent.empty()) agent = group + "-agent";
  std::vector<epoch::Member> members;
  for (uint32_t rank = 0; rank < world; ++rank) {
    auto member = Register(agent, role, group, rank, world);
    EXPECT_TRUE(member.has_value()) << member.error().ToString();
    const Status status = SubmitRows(*member, rank, world);
    EXPECT_TRUE(status.ok()) << status.ToString();
    members.push_back(*member);
  }
  sim.RunReady();
  return members;
}

Status Fleet::Publish(const epoch::Member& member, uint64_t version, bool manual, Nanos deadline) {
  control::PublishRequest request;
  request.member = member;
  request.version = Version(version);
  request.manual_commit = manual;
  request.deadline = deadline;
  std::optional<Status> answer;
  coordinator->Publish(request, [&](Status status) { answer = std::move(status); });
  sim.RunReady();
  EXPECT_TRUE(answer.has_value());
  return *answer;
}

void Fleet::PublishAll(const std::vector<epoch::Member>& trainer, uint64_t version, bool manual,
                       Nanos deadline) {
  for (const epoch::Member& member : trainer) {
    const Status status = Publish(member, version, manual, deadline);
    EXPECT_TRUE(status.ok()) << status.ToString();
  }
}

EngineStatus Fleet::EngineNamed(const std::string& name) const {
  for (const EngineStatus& engine : coordinator->Snapshot().engines) {
    if (engine.name == name) return engine;
  }
  ADD_FAILURE() << "no engine " << name;
  return {};
}

std::optional<Status> Fleet::Released(const epoch::Member& member, uint64_t version) const {
  std::optional<Status> why;
  for (const auto& [name, agent] : agents) {
    for (const auto& release : agent->All<epoch::ReleaseCommand>()) {
      if (release.member != member || release.version != Version(version)) continue;
      EXPECT_FALSE(why.has_value()) << "a version is released once";
      why = release.why;
    }
  }
  return why;
}

}  // namespace weightwire::coordinator::testing
