#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/agent/agent.h"
#include "server/agent/services.h"

namespace weightwire::agent {

/// One local rank's memory: what its process shared with us, or we lent it (trainer), or its stage
/// (engine). Belongs to the agent's strand. Destroyed only when nothing of the rank runs any more.
class RankMemory : public std::enable_shared_from_this<RankMemory> {
 public:
  /// `buffers`: of the stage, should it be made. `gpu_pools`: of the rank's device; null: host
  /// memory. `delta`: what its process asks for (AttachRequest).
  RankMemory(std::shared_ptr<Services> services, std::string name, uint32_t buffers,
             std::shared_ptr<memory::GpuMemoryPool> gpu_pools,
             std::optional<transfer::DeltaPolicy::Mode> delta)
      : services_(std::move(services)),
        name_(std::move(name)),
        buffers_(buffers),
        gpu_pools_(std::move(gpu_pools)),
        delta_mode_(delta) {
    for (auto& kept : kept_) kept = std::make_shared<transfer::Kept>();
  }
  ~RankMemory();

  /// Sets the agreed layout, once. kInvalidArgument / kShapeOverflow when its sizes do not fit.
  Status SetLayout(std::shared_ptr<const layout::RankLayout> agreed);
  /// Null before SetLayout.
  const std::shared_ptr<const layout::RankLayout>& layout() const { return layout_; }
  /// Bytes of each tensor, in the layout's order, and where each lies in an arena of its own.
  const memory::ArenaMap& arena() const { return arena_; }

  Result<uint64_t> Import(memory::UniqueFd fd, uint64_t bytes);
  Result<GpuAllocation> AllocateGpuMemory(uint64_t bytes);
  /// Replaces the binding as a whole or not at all; regions that it does not use are let go.
  Status Bind(const std::vector<TensorBinding>& bindings);
  bool bound() const { return binding_.has_value(); }
  const transfer::Binding& binding() const { return *binding_; }

  /// Makes the stage on the workers, once; `done` runs at once when it exists or is refused.
  void MakeStage(control::Done done);
  Result<StageInfo> OpenStage();
  /// Makes room for what a plan gathers, where there is not as much already, on the workers or at
  /// once; `done` runs when it is there or refused. One call at a time.
  ///   kResourceExhausted / kLimitExceeded  names need, use and budget
  void MakeGather(const plan::GatherBuffer& gathered, control::Done done);
  /// Null until made.
  memory::StageBuffers* stage() const { return stage_.get(); }
  transfer::Binding StageBinding(int buffer) const;
  /// The same, and behind it what `gathered` wants, which has been made.
  transfer::Binding TargetBinding(int buffer, const plan::GatherBuffer& gathered) const;
  /// What the stage holds whole beside what is served; nothing before it is made.
  epoch::Contents held() const;
  /// `held` without what the next epoch overwrites.
  epoch::Contents held_beyond() const;
  /// What is known of a buffer's bytes.
  const std::shared_ptr<transfer::Kept>& kept(int buffer) const {
    return kept_[static_cast<size_t>(buffer)];
  }
  /// Of what a trainer's rank served last (transfer::SourceJob::heads).
  const std::shared_ptr<transfer::Heads>& heads() const { return heads_; }
  /// What a trainer's rank sent last (transfer::SourceJob::delta); null where nothing is coded.
  const std::shared_ptr<transfer::DeltaBases>& delta();
  /// Every bound tensor but the `unchanged` ones may hold other bytes now.
  ///   kInvalidArgument / kInvalidRequest  an index that is not of the layout
  Status MarkChanged(const std::vector<uint32_t>& unchanged);
  /// By tensor (transfer::SourceJob::generations).
  const std::vector<uint64_t>& generations() const { return generations_; }
  const std::shared_ptr<std::map<PlanId, transfer::ServedSums>>& served() const { return served_; }
  /// With what is gathered in.
  uint64_t stage_bytes() const;

 private:
  struct Imported {
    std::shared_ptr<memory::MemoryRegion> region;
    Budget::Share share;
  };
  /// OK when one more region may be kept.
  Status AdmitRegion() const;
  uint64_t Keep(std::shared_ptr<memory::MemoryRegion> region, Budget::Share share);
  /// OK: made, or being made now. Else why it cannot be.
  Status StartStage();
  Result<memory::RegionSpan> SpanFor(const TensorBinding& binding) const;
  void StageMade(Result<std::unique_ptr<memory::StageBuffers>> made, Budget::Share share);
  void GatherMade(Result<std::shared_ptr<memory::MemoryRegion>> made, Budget::Share share,
                  const control::Done& done);

  const std::shared_ptr<Services> services_;
  const std::string name_;
  const uint32_t buffers_;
  const std::shared_ptr<memory::GpuMemoryPool> gpu_pools_;
  const std::optional<transfer::DeltaPolicy::Mode> delta_mode_;
  std::shared_ptr<const layout::RankLayout> layout_;
  memory::ArenaMap arena_;
  std::map<uint64_t, Imported> imports_;
  std::optional<transfer::Binding> binding_;
  std::unique_ptr<memory::StageBuffers> stage_;
  std::array<std::shared_ptr<transfer::Kept>, memory::kBuffersMax> kept_;
  const std::shared_ptr<transfer::Heads> heads_ = std::make_shared<transfer::Heads>();
  std::shared_ptr<transfer::DeltaBases> delta_;
  std::vector<uint64_t> generations_;
  const std::shared_ptr<std::map<PlanId, transfer::ServedSums>> served_ =
      std::make_shared<std::map<PlanId, transfer::ServedSums>>();
  Budget::Share stage_share_;
  bool making_stage_ = false;
  std::vector<control::Done> stage_waiters_;
  std::shared_ptr<memory::MemoryRegion> gather_;  ///< one for all buffers
  Budget::Share gather_share_;
};

/// One span for each tensor of `arena` inside `region`.
transfer::Binding ArenaBinding(const memory::ArenaMap& arena,
                               const std::shared_ptr<memory::MemoryRegion>& region);

}  // namespace weightwire::agent
