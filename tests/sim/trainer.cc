#include "tests/sim/trainer.h"

#include <gtest/gtest.h>

#include <cstring>

#include "tests/sim/heap_regions.h"

namespace weightwire::sim {
namespace {

constexpr Nanos kRestartPause = std::chrono::milliseconds(300);
/// What a trainer's padding holds: must never be seen in an engine.
constexpr uint8_t kTrainerPadding = 0xdd;

}  // namespace

Trainer::Trainer(testing::SimExecutor& executor, std::mt19937_64& random, const Model& model,
                 Party party, std::vector<Node*> nodes)
    : executor_(executor), random_(random), model_(model), party_(std::move(party)) {
  ranks_.resize(party_.world_size);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].node = nodes[rank % nodes.size()];
    ranks_[rank].node->on_killed.push_back([this, rank] {
      if (auto process = ranks_[rank].process) process->AgentDied();
    });
  }
}

void Trainer::Start() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) Spawn(rank);
}

void Trainer::Spawn(uint32_t rank) {
  Process::Hooks hooks;
  hooks.ready = [this, rank](Process&) { Ready(rank); };
  hooks.ended = [this, rank](Process& process, const Status& why) { Ended(rank, process, why); };
  hooks.released = [this, rank](Process& process, Version version, Epoch, const Status& why) {
    Released(rank, process, version, why);
  };
  hooks.committed = [](Process&, Epoch, Epoch, const coordinator::VersionId&, int, bool) {
    ADD_FAILURE() << "a trainer was offered a swap";
  };
  hooks.installed = [](Process&, Epoch, Epoch) { ADD_FAILURE() << "a trainer was installed"; };
  hooks.room_wanted = [](Process&, Epoch) { ADD_FAILURE() << "a trainer was asked for room"; };
  Rank& here = ranks_[rank];
  here.process = std::make_shared<Process>(*here.node, model_, party_, control::GroupRole::kTrainer,
                                           "trainer", rank, Incarnation{random_() | 1},
                                           here.process ? here.process->survives() : Incarnation{},
                                           memory::kBuffersUsual, hooks);
  ended_.push_back(here.process);
  here.bound = here.publishing = false;
  here.version = 0;
  here.memory.reset();
  here.process->Attach();
}

void Trainer::Ready(uint32_t rank) {
  Rank& here = ranks_[rank];
  const auto& image = model_.Bytes(party_, rank, 0, kTrainerPadding);
  uint64_t end = 0;
  here.offsets.clear();
  for (const auto& tensor : image) {
    here.offsets.push_back(end);
    end += tensor.size() + 2;  // unaligned neighbours, a gap between them
  }
  here.memory = memory::MemoryRegion::Allocate("trainer", end).value();
  agent::Agent& agent = here.process->agent();
  const auto region = agent.ImportMemory(here.process->handle(), AnotherFd(*here.memory), end);
  ASSERT_TRUE(region.has_value()) << region.error().ToString();
  std::vector<agent::TensorBinding> bindings;
  for (uint32_t i = 0; i < image.size(); ++i) bindings.push_back({i, *region, here.offsets[i]});
  const Status bound = agent.Bind(here.process->handle(), bindings);
  ASSERT_TRUE(bound.ok()) << bound.ToString();
  here.bound = true;
  Scribble(rank);
}

void Trainer::Ended(uint32_t rank, const Process& process, const Status& why) {
  Rank& here = ranks_[rank];
  if (here.process.get() != &process) return;
  if (here.bound) ++evictions_;
  if (here.version != 0 || here.publishing) outcome_ = why;
  here.bound = here.publishing = false;
  here.version = 0;
  if (!restart_) return;
  executor_.PostAfter(kRestartPause, [this, rank, ended = here.process] {
    if (ranks_[rank].process == ended) Spawn(rank);
  });
}

void Trainer::Write(uint32_t rank) {
  Rank& here = ranks_[rank];
  const uint64_t content = ContentOf({here.call.lineage, here.call.version});
  const auto& image = model_.Bytes(party_, rank, content, kTrainerPadding);
  for (size_t i = 0; i < image.size(); ++i) {
    std::memcpy(here.memory->data() + here.offsets[i], image[i].data(), image[i].size());
  }
}

void Trainer::Scribble(uint32_t rank) {
  std::memset(ranks_[rank].memory->data(), static_cast<int>(random_() & 0xff),
              ranks_[rank].memory->size());
}

void Trainer::Publish(uint64_t version, agent::PublishMode mode, Nanos deadline, uint64_t lineage) {
  outcome_ = OkStatus();
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& here = ranks_[rank];
    here.version = version;
    here.call = {Version{version}, mode, false, deadline, {}, here.call.number, lineage};
    PublishFrom(rank);
  }
}

void Trainer::PublishFrom(uint32_t rank) {
  Rank& here = ranks_[rank];
  Write(rank);
  here.publishing = true;
  ++here.call.number;
  here.process->agent().Publish(here.process->handle(), here.call,
                                [this, rank, process = here.process](const Status& status) {
                                  Rank& now = ranks_[rank];
                                  if (now.process != process) return;
                                  now.publishing = false;
                                  if (status.ok()) return;
                                  outcome_ = status;
                                  now.version = 0;
                                  if (now.bound) Scribble(rank);
                                });
}

void Trainer::Withdraw(uint32_t rank, bool if_accepted, bool again) {
  Rank& here = ranks_[rank];
  if (!here.bound || here.version == 0) return;
  here.process->agent().Withdraw(
      here.process->handle(), {Version{here.version}, here.call.number, if_accepted},
      [this, rank, again, process = here.process,
       number = here.call.number](const Result<agent::Withdrawal>& found) {
        const Rank& now = ranks_[rank];  // another withdrawal may have been answered first
        if (now.process != process || now.call.number != number || now.version == 0) return;
        if (found) Withdrawn(rank, *found, again);
      });
}

void Trainer::Withdrawn(uint32_t rank, agent::Withdrawal found, bool again) {
  Rank& here = ranks_[rank];
  ++withdrawals_[found];
  if (found == agent::Withdrawal::kRead) Scribble(rank);
  if (found != agent::Withdrawal::kRevoked) return;
  here.version = 0;
  Scribble(rank);
  if (!again) return;
  here.version = here.call.version.value;
  PublishFrom(rank);
}

void Trainer::Released(uint32_t rank, const Process& process, Version version, const Status& why) {
  Rank& here = ranks_[rank];
  if (here.process.get() != &process) return;
  EXPECT_EQ(version.value, here.version) << "released what is not held, rank " << rank;
  here.version = 0;
  if (!why.ok()) outcome_ = why;
  Scribble(rank);
}

bool Trainer::Idle() const {
  for (const Rank& rank : ranks_) {
    if (!rank.bound || rank.publishing || rank.version != 0) return false;
  }
  return true;
}

std::string Trainer::Describe() const {
  std::string text;
  for (const Rank& rank : ranks_) {
    text += "; rank on " + rank.node->name() + (rank.bound ? " bound" : " not bound") +
            (rank.publishing ? " publishing" : "") + " version " + std::to_string(rank.version);
  }
  return text;
}

void Trainer::KillRank(uint32_t rank) { ranks_[rank].process->Kill(); }

void Trainer::Restart() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) KillRank(rank);
}

}  // namespace weightwire::sim
