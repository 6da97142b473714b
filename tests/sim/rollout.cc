#include "tests/sim/rollout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

namespace weightwire::sim {
namespace {

constexpr Nanos kRestartPause = std::chrono::milliseconds(400);

}  // namespace

Rollout::Rollout(testing::SimExecutor& executor, std::mt19937_64& random, const Model& model,
                 std::string name, Party party, std::vector<Node*> nodes, uint32_t buffers,
                 const Ledger& ledger)
    : executor_(executor),
      random_(random),
      model_(model),
      name_(std::move(name)),
      party_(std::move(party)),
      buffers_(buffers),
      ledger_(ledger) {
  ranks_.resize(party_.world_size);
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].node = nodes[rank % nodes.size()];
    ranks_[rank].node->on_killed.push_back([this, rank] {
      ++deaths_;
      if (auto process = ranks_[rank].process) process->AgentDied();
    });
  }
}

void Rollout::Start() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) Spawn(rank);
}

void Rollout::Spawn(uint32_t rank) {
  Process::Hooks hooks;
  hooks.ready = [this, rank](Process& process) {
    auto stage = process.agent().OpenStage(process.handle());
    ASSERT_TRUE(stage.has_value()) << stage.error().ToString();
    ranks_[rank].stage = *stage;
  };
  hooks.ended = [this, rank](Process& process, const Status& why) { Ended(rank, process, why); };
  hooks.released = [](Process&, Version, Epoch, const Status&) {
    ADD_FAILURE() << "an engine was released";
  };
  hooks.committed = [this, rank](Process& process, Epoch epoch, Epoch content,
                                 const coordinator::VersionId& id, int buffer, bool leader) {
    Committed(rank, process, {epoch, content, id, buffer, leader});
  };
  hooks.installed = [this, rank](Process&, Epoch, Epoch content) {
    // (The engine may have ended since, by another rank's death.)
    EXPECT_EQ(ranks_[rank].swapped, content) << name_ << " has not swapped";
    ranks_[rank].offer.reset();
  };
  hooks.room_wanted = [this, rank](Process& process, Epoch epoch) {
    EXPECT_EQ(buffers_, 1u) << name_ << " has a buffer to spare";
    const Nanos step(static_cast<int64_t>(random_() % (step_max_.count() + 1)));
    executor_.PostAfter(step, [this, rank, epoch, asked = &process] {
      if (asked->live()) MakeRoom(rank, *asked, epoch);
    });
  };
  Rank& here = ranks_[rank];
  here.process = std::make_shared<Process>(*here.node, model_, party_, control::GroupRole::kEngine,
                                           name_, rank, Incarnation{random_() | 1},
                                           here.process ? here.process->survives() : Incarnation{},
                                           buffers_, hooks);
  processes_.push_back(here.process);
  here.stage.reset();
  here.offer.reset();
  here.swapped = {};
  here.process->Attach();
}

void Rollout::Ended(uint32_t rank, const Process& process, const Status& why) {
  Rank& here = ranks_[rank];
  if (here.process.get() != &process) return;
  EXPECT_TRUE(!served_ || deaths_ > deaths_at_flip_)
      << name_ << "/" << rank << " was taken version " << version()
      << ", though no process or agent of the engine died and it refused nothing: "
      << why.ToString();
  ++lives_;
  CheckServedBytes();
  served_.reset();
  for (Rank& other : ranks_) other.offer.reset();
  here.stage.reset();
  if (!restart_) return;
  executor_.PostAfter(kRestartPause, [this, rank, ended = here.process] {
    if (ranks_[rank].process == ended) Spawn(rank);
  });
}

void Rollout::Committed(uint32_t rank, const Process& process, Offer offer) {
  if (ranks_[rank].process.get() != &process) return;
  EXPECT_FALSE(ranks_[rank].offer.has_value()) << name_ << ": two swaps at once";
  EXPECT_EQ(offer.leader, rank == 0);
  EXPECT_TRUE(!served_ || served_->buffer != offer.buffer) << name_ << ": the served buffer again";
  ranks_[rank].offer = offer;
  FlipWhenAllAreOffered();
}

/// The engine stops before any rank gives its buffer up; it goes on only when none has.
void Rollout::MakeRoom(uint32_t rank, const Process& process, Epoch epoch) {
  if (ranks_[rank].process.get() != &process) return;
  CheckServedBytes();
  const auto before = std::exchange(served_, std::nullopt);
  const Status status = ranks_[rank].process->agent().MakeRoom(process.handle(), epoch);
  if (status.ok()) {
    ++rooms_;
  } else {
    EXPECT_EQ(status.reason(), Reason::kStaleEpoch) << status.ToString();
    served_ = before;
  }
}

bool Rollout::Ready() const {
  return std::ranges::all_of(ranks_, [](const Rank& rank) { return rank.stage.has_value(); });
}

bool Rollout::AllOffered(Epoch epoch) const {
  for (const Rank& rank : ranks_) {
    if (!rank.offer || rank.offer->epoch != epoch || !rank.stage) return false;
  }
  return true;
}

void Rollout::FlipWhenAllAreOffered() {
  if (!ranks_[0].offer) return;
  const Epoch epoch = ranks_[0].offer->epoch;
  if (!AllOffered(epoch)) return;
  const Nanos step(static_cast<int64_t>(random_() % (step_max_.count() + 1)));
  executor_.PostAfter(step, [this, epoch, life = lives_] {
    if (life == lives_ && AllOffered(epoch)) Flip(epoch);
  });
}

void Rollout::Flip(Epoch epoch) {
  if (before_flip) before_flip();
  if (!AllOffered(epoch)) return;  // the fault ended it
  CheckServedBytes();
  const Offer offer = *ranks_[0].offer;
  const auto id = ledger_.CommittedAs(offer.content, offer.id.version);
  EXPECT_TRUE(id) << name_ << " serves epoch " << offer.content.value
                  << ", whose COMMIT is not durable";
  if (!id) return;
  EXPECT_TRUE(offer.id.lineage == 0 || offer.id == *id)
      << name_ << " was offered " << coordinator::ToString(offer.id) << ", which is "
      << coordinator::ToString(*id);
  Served serves{offer.content, *id, offer.buffer, {}};
  for (uint32_t i = 0; i < ranks_.size(); ++i) {
    const Offer& other = *ranks_[i].offer;
    EXPECT_EQ(other.id, offer.id) << name_ << ": ranks were offered different versions";
    EXPECT_EQ(other.content, offer.content);
    EXPECT_EQ(other.buffer, offer.buffer);
    serves.bytes.emplace_back(ranks_[i].stage->buffers[static_cast<size_t>(other.buffer)].get(),
                              &model_.Buffer(party_, i, ContentOf(*id)));
    EXPECT_TRUE(Holds(*serves.bytes[i].first, *serves.bytes[i].second))
        << name_ << "/" << i << " was offered bytes that are not " << coordinator::ToString(*id);
  }
  ExpectMayFollow(serves);
  Process& leader = *ranks_[0].process;
  if (refuses && refuses()) {
    const Status status = leader.agent().RefuseSwap(leader.handle(), epoch, "a canary");
    EXPECT_TRUE(status.ok()) << status.ToString();
    ++deaths_;  // its own wish
    return;
  }
  for (Rank& rank : ranks_) rank.swapped = offer.content;
  last_content_ = serves.content;
  last_ = serves.id;
  served_ = std::move(serves);
  deaths_at_flip_ = deaths_;
  ++flips_;
  const Status status = leader.agent().AcknowledgeSwap(leader.handle(), epoch, 0.001);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

void Rollout::ExpectMayFollow(const Served& next) const {
  EXPECT_TRUE(!served_ || served_->content < next.content) << name_ << " goes back";
  EXPECT_LE(last_content_, next.content) << name_ << " goes back from an earlier life";
  const bool newer = last_ < next.id || (last_content_ == next.content && last_ == next.id);
  EXPECT_TRUE(newer || ledger_.RolledBack(last_content_, next.content))
      << name_ << " goes back from " << coordinator::ToString(last_) << " to "
      << coordinator::ToString(next.id) << ", and nobody asked for it";
}

bool Rollout::Holds(const memory::MemoryRegion& region, const std::vector<uint8_t>& wanted) {
  return region.size() == wanted.size() &&
         std::memcmp(region.data(), wanted.data(), wanted.size()) == 0;
}

void Rollout::CheckServedBytes() const {
  if (!served_) return;
  for (size_t i = 0; i < served_->bytes.size(); ++i) {
    const auto& [region, wanted] = served_->bytes[i];
    ASSERT_TRUE(Holds(*region, *wanted))
        << name_ << "/" << i << " serves bytes that are not " << coordinator::ToString(served_->id);
  }
}

bool Rollout::HoldsStaged(const coordinator::VersionId& id) const {
  for (uint32_t i = 0; i < ranks_.size(); ++i) {
    if (!ranks_[i].stage) continue;
    bool held = false;
    for (const auto& buffer : ranks_[i].stage->buffers) {
      held |= Holds(*buffer, model_.Buffer(party_, i, ContentOf(id)));
    }
    if (!held) return false;
  }
  return true;
}

void Rollout::KillRank(uint32_t rank) {
  ++deaths_;
  ranks_[rank].process->Kill();
}

}  // namespace weightwire::sim
