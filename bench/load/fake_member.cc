#include "bench/load/fake_member.h"

#include <cstdio>
#include <cstdlib>

#include "server/wire/control.h"

namespace weightwire::load {
namespace {

constexpr int64_t kRows = 4096, kColumns = 8;

layout::CanonicalSpace Model() { return {{{"w", layout::DType::kBF16, {kRows, kColumns}}}}; }

layout::RankLayout Rows(uint32_t rank, uint32_t ranks) {
  const int64_t begin = kRows * rank / ranks, end = kRows * (rank + 1) / ranks;
  layout::LocalTensor tensor{"w", layout::DType::kBF16, {end - begin, kColumns}, {}};
  layout::Piece piece;
  piece.box = {{begin, 0}, tensor.shape};
  piece.local_stride = {kColumns, 1};
  tensor.pieces.push_back(piece);
  layout::RankLayout rows;
  rows.tensors.push_back(tensor);
  return rows;
}

/// Whatever cannot be answered ends the benchmark: its figures would be of something else.
[[noreturn]] void Die(const std::string& who, const Status& why) {
  std::fprintf(stderr, "stand-in %s: %s\n", who.c_str(), why.ToString().c_str());
  std::exit(1);
}

}  // namespace

FakeMember::FakeMember(std::unique_ptr<control::CoordinatorPort> port, ThreadExecutor& strand,
                       control::GroupRole role, std::string group, uint32_t ranks, uint64_t number)
    : strand_(strand),
      role_(role),
      group_(std::move(group)),
      ranks_(ranks),
      number_(number),
      port_(std::move(port)) {}

void FakeMember::Open(std::function<void()> ready) {
  ready_ = std::move(ready);
  control::AgentHello hello;
  hello.job = "default";
  hello.name = hello.host = "load-" + group_;
  hello.incarnation = Incarnation(number_ << 16 | 0xffff);
  hello.addresses = {{"tcp", "127.0.0.1:1"}};
  port_->OpenSession(hello, this, [this](Result<control::AgentWelcome> welcome) {
    if (!welcome) Die(group_, welcome.error());
    id_ = welcome->agent;
    Beat(welcome->heartbeat * 3 / 4);
    for (uint32_t rank = 0; rank < ranks_; ++rank) Register(rank);
  });
}

void FakeMember::Beat(Nanos interval) {
  port_->Heartbeat(id_, {});
  strand_.PostAfter(interval, [this, interval, alive = std::weak_ptr(alive_)] {
    if (alive.lock()) Beat(interval);
  });
}

void FakeMember::Register(uint32_t rank) {
  control::RegisterRequest request;
  request.agent = id_;
  request.job = "default";
  request.role = role_;
  request.group = group_;
  request.rank = rank;
  request.world_size = ranks_;
  request.incarnation = Incarnation(number_ << 16 | (rank + 1));
  port_->Register(request, [this, rank](const Result<control::RegisterReply>& reply) {
    if (!reply) Die(group_, reply.error());
    Submit(rank, reply->member);
  });
}

void FakeMember::Submit(uint32_t rank, const epoch::Member& member) {
  members_[rank] = member;
  control::LayoutSubmission submission;
  submission.member = member;
  submission.canonical = Model();
  submission.layout = Rows(rank, ranks_);
  port_->SubmitLayout(std::move(submission), [this](const Result<control::LayoutReply>& reply) {
    if (!reply) Die(group_, reply.error());
    if (++submitted_ == ranks_) ready_();
  });
}

void FakeMember::Publish(Version version, std::function<void(Status)> released) {
  released_ = std::move(released);
  awaited_ = ranks_;
  for (const auto& [rank, member] : members_) {
    control::PublishRequest request;
    request.member = member;
    request.version = version;
    request.deadline = std::chrono::seconds(600);
    port_->Publish(request, [this](const Status& status) {
      if (!status.ok()) Die(group_, status);
    });
  }
}

void FakeMember::OnCommand(epoch::Command command) {
  if (bytes_) *bytes_ += static_cast<int64_t>(wire::ToProto(command).ByteSizeLong());
  std::visit([this](const auto& c) { Answer(c); }, command);
}

void FakeMember::OnSessionLost(Status why) { Die(group_, why); }

void FakeMember::Answer(const epoch::PrepareCommand& command) {
  prepared_[command.member] = command;
  Fetched(command, 0);
}

/// Has the slices of the assignments before `assignment`; one of a plan that was fetched before is
/// kept.
void FakeMember::Fetched(const epoch::PrepareCommand& command, size_t assignment) {
  if (assignment == command.assignments.size()) {
    return port_->Report(id_, epoch::PreparedReport{command.epoch, command.member});
  }
  const auto [plan, rank, readers] = command.assignments[assignment];
  if (slices_.contains({plan, rank})) return Fetched(command, assignment + 1);
  const auto side =
      command.role == epoch::Role::kSource ? plan::Side::kSource : plan::Side::kTarget;
  port_->FetchSlice(plan, side, rank, [this, command, assignment](const Result<SlicePtr>& slice) {
    if (!slice) Die(group_, slice.error());
    slices_[{command.assignments[assignment].plan, command.assignments[assignment].rank}] = *slice;
    Fetched(command, assignment + 1);
  });
}

/// Digests that both ends of a stream agree on.
void FakeMember::Answer(const epoch::TransferCommand& command) {
  const epoch::PrepareCommand& prepare = prepared_.at(command.member);
  std::vector<epoch::Digest> digests;
  int64_t bytes = 0;
  for (const epoch::PlanAssignment& assignment : prepare.assignments) {
    for (const plan::Stream& stream : slices_.at({assignment.plan, assignment.rank})->streams) {
      digests.push_back(
          {assignment.plan, stream.id, assignment.plan.low ^ stream.id ^ prepare.version.value});
      bytes += stream.bytes;
    }
  }
  if (prepare.role == epoch::Role::kSource) {
    return port_->Report(
        id_, epoch::SourceDoneReport{command.epoch, command.member, std::move(digests)});
  }
  epoch::StagedReport staged;
  staged.epoch = command.epoch;
  staged.member = command.member;
  staged.digests = std::move(digests);
  staged.bytes = bytes;
  staged.bytes_by_transport = {{"tcp", bytes}};
  port_->Report(id_, std::move(staged));
}

void FakeMember::Answer(const epoch::ReleaseCommand& command) {
  if (!command.why.ok()) Die(group_, command.why);
  if (--awaited_ == 0) std::exchange(released_, {})(command.why);
}

void FakeMember::Answer(const epoch::CommitCommand& command) {
  if (command.leader) port_->Report(id_, epoch::SwappedReport{command.epoch, command.member, 0});
}

void FakeMember::Answer(const epoch::AbortCommand& command) { Die(group_, command.why); }

void FakeMember::Answer(const epoch::EvictCommand& command) { Die(group_, command.why); }

}  // namespace weightwire::load
