#include "server/agent/rank_memory.h"

#include <set>
#include <utility>

#include "server/base/checked.h"
#include "server/base/failpoint.h"
#include "server/transfer/staging.h"

namespace weightwire::agent {
namespace {

epoch::Contents ContentsOf(const std::vector<memory::StageBuffers::Content>& held) {
  epoch::Contents contents;
  for (const auto& content : held) contents.push_back({content.epoch, content.version});
  return contents;
}

Status NoLayout() {
  return Status(Code::kFailedPrecondition, Reason::kNotReady, "no layout has been agreed yet")
      .Remedy("submit the layout first");
}

}  // namespace

transfer::Binding ArenaBinding(const memory::ArenaMap& arena,
                               const std::shared_ptr<memory::MemoryRegion>& region) {
  transfer::Binding binding;
  binding.reserve(arena.offsets.size());
  for (size_t i = 0; i < arena.offsets.size(); ++i) {
    binding.push_back({region, arena.offsets[i], arena.sizes[i]});
  }
  return binding;
}

RankMemory::~RankMemory() { services_->imported_regions -= imports_.size(); }

Status RankMemory::SetLayout(std::shared_ptr<const layout::RankLayout> agreed) {
  WW_ASSIGN_OR_STATUS(arena_, transfer::StageArenaOf(*agreed));
  layout_ = std::move(agreed);
  return OkStatus();
}

Status RankMemory::AdmitRegion() const {
  if (services_->imported_regions < services_->options.imported_regions_max) return OkStatus();
  return Status(Code::kResourceExhausted, Reason::kLimitExceeded,
                "the agent maps " + std::to_string(services_->imported_regions) +
                    " regions already, its limit");
}

uint64_t RankMemory::Keep(std::shared_ptr<memory::MemoryRegion> region, Budget::Share share) {
  const uint64_t id = region->id();
  imports_.emplace(id, Imported{std::move(region), std::move(share)});
  ++services_->imported_regions;
  return id;
}

Result<uint64_t> RankMemory::Import(memory::UniqueFd fd, uint64_t bytes) {
  WW_FAIL_IF_ERROR(AdmitRegion());
  WW_ASSIGN(auto region,
            memory::MemoryRegion::Import(std::move(fd), bytes, memory::Access::kReadOnly));
  Budget::Share share = services_->budget->CountImported(region->size());
  return Keep(std::move(region), std::move(share));
}

Result<GpuAllocation> RankMemory::AllocateGpuMemory(uint64_t bytes) {
  if (!gpu_pools_) {
    return Fail(Status(Code::kFailedPrecondition, Reason::kNotReady,
                       "the rank has no device here to lend memory of")
                    .AtRank(name_)
                    .Remedy("attach with a device, and read in the answer why there is none"));
  }
  WW_FAIL_IF_ERROR(AdmitRegion());
  auto region = gpu_pools_->Allocate("GPU memory of " + name_, bytes);
  if (!region) return Fail(std::move(region.error()).AtRank(name_));
  return GpuAllocation{Keep(*region, {}), *region};
}

uint64_t RankMemory::stage_bytes() const {
  const bool on_device = stage_ && gpu_pools_;
  const uint64_t stage = on_device ? transfer::StageBytes(arena_, buffers_) : stage_share_.bytes();
  return stage + (gather_ ? gather_->size() : 0);
}

Result<memory::RegionSpan> RankMemory::SpanFor(const TensorBinding& binding) const {
  const layout::LocalTensor& tensor = layout_->tensors[binding.tensor];
  auto import = imports_.find(binding.region);
  if (import == imports_.end()) {
    return Fail(Status(Code::kInvalidArgument, Reason::kMemoryInvalid,
                       "region " + std::to_string(binding.region) + " was not imported here")
                    .AtTensor(tensor.name));
  }
  if (binding.offset % static_cast<uint64_t>(layout::ElementBytes(tensor.dtype)) != 0) {
    return Fail(Status(Code::kInvalidArgument, Reason::kMemoryInvalid,
                       "offset " + std::to_string(binding.offset) + " splits an element")
                    .AtTensor(tensor.name));
  }
  const auto& region = import->second.region;
  const uint64_t bytes = arena_.sizes[binding.tensor];
  if (binding.offset > region->size() || bytes > region->size() - binding.offset) {
    return Fail(Status(Code::kInvalidArgument, Reason::kMemoryTooSmall,
                       "needs " + std::to_string(bytes) + " bytes at offset " +
                           std::to_string(binding.offset) + "; the region has " +
                           std::to_string(region->size()))
                    .AtTensor(tensor.name));
  }
  return memory::SpanOf(region, binding.offset, bytes);
}

Status RankMemory::Bind(const std::vector<TensorBinding>& bindings) {
  if (!layout_) return NoLayout();
  transfer::Binding bound(layout_->tensors.size());
  std::vector<bool> seen(bound.size());
  for (const TensorBinding& binding : bindings) {
    if (binding.tensor >= bound.size() || seen[binding.tensor]) {
      return Status(
          Code::kInvalidArgument, Reason::kMemoryInvalid,
          "tensor " + std::to_string(binding.tensor) +
              (binding.tensor < bound.size() ? " is bound twice" : " is not part of the layout"));
    }
    seen[binding.tensor] = true;
    WW_ASSIGN_OR_STATUS(bound[binding.tensor], SpanFor(binding));
  }
  for (size_t i = 0; i < seen.size(); ++i) {
    if (seen[i]) continue;
    return Status(Code::kInvalidArgument, Reason::kTensorMissing, "the tensor is not bound")
        .AtTensor(layout_->tensors[i].name);
  }
  WW_FAILPOINT("agent.before_memory_bound");
  binding_ = std::move(bound);
  generations_.resize(binding_->size());
  for (uint64_t& generation : generations_) ++generation;
  std::set<uint64_t> used;
  for (const TensorBinding& binding : bindings) used.insert(binding.region);
  services_->imported_regions -=
      std::erase_if(imports_, [&](const auto& import) { return !used.contains(import.first); });
  return OkStatus();
}

// Files take no memory of the budget: the kernel takes theirs back when it needs it.
const std::shared_ptr<transfer::DeltaBases>& RankMemory::delta() {
  using Share = transfer::DeltaBases::Share;
  using Mode = transfer::DeltaPolicy::Mode;
  transfer::DeltaPolicy policy = services_->options.delta;
  if (delta_ || policy.mode == Mode::kOff || delta_mode_ == Mode::kOff) return delta_;
  policy.mode = delta_mode_.value_or(policy.mode);
  if (!policy.folder.empty()) {
    delta_ = std::make_shared<transfer::DeltaBases>(
        policy, [](uint64_t) -> Result<Share> { return Share(); });
    return delta_;
  }
  const auto admit = [services = services_, name = name_](uint64_t bytes) -> Result<Share> {
    WW_ASSIGN(Budget::Share share, services->budget->AdmitSpare(name + ": delta base", bytes));
    return Share(std::make_shared<Budget::Share>(std::move(share)));
  };
  delta_ = std::make_shared<transfer::DeltaBases>(policy, admit);
  services_->budget->OnShortage([weak = std::weak_ptr(delta_)] {
    const auto bases = weak.lock();
    if (bases) bases->GiveUp();
    return bases != nullptr;
  });
  return delta_;
}

Status RankMemory::MarkChanged(const std::vector<uint32_t>& unchanged) {
  std::vector<bool> same(generations_.size());
  for (const uint32_t tensor : unchanged) {
    if (tensor >= same.size()) {
      return Status(Code::kInvalidArgument, Reason::kInvalidRequest,
                    "unchanged: tensor " + std::to_string(tensor) + " is not part of the layout");
    }
    same[tensor] = true;
  }
  for (size_t i = 0; i < same.size(); ++i) generations_[i] += same[i] ? 0 : 1;
  return OkStatus();
}

void RankMemory::MakeStage(control::Done done) {
  Status status = StartStage();
  if (!making_stage_) return done(std::move(status));
  stage_waiters_.push_back(std::move(done));
}

Status RankMemory::StartStage() {
  if (!layout_) return NoLayout();
  if (stage_ || making_stage_) return OkStatus();
  if (gpu_pools_) {  // allocated at once, or refused: no host memory is made
    auto made = memory::StageBuffers::Make("the stage of " + name_, arena_, buffers_, gpu_pools_);
    if (!made) return std::move(made.error()).AtRank(name_);
    stage_ = std::move(*made);
    return OkStatus();
  }
  const uint64_t bytes = transfer::StageBytes(arena_, buffers_);
  auto admitted = services_->budget->AdmitStaging("the stage of " + name_, bytes);
  if (!admitted) return std::move(admitted.error()).AtRank(name_);
  making_stage_ = true;
  // The strand alone may give the share back: the worker passes it on and never holds the last one.
  auto share = std::make_shared<Budget::Share>(std::move(*admitted));
  services_->workers.Post([weak = weak_from_this(), share = std::move(share), name = name_,
                           arena = arena_, buffers = buffers_,
                           &strand = services_->strand]() mutable {
    auto made = std::make_shared<Result<std::unique_ptr<memory::StageBuffers>>>(
        memory::StageBuffers::Make(name, std::move(arena), buffers));
    strand.Post([weak = std::move(weak), share = std::move(share), made = std::move(made)] {
      if (auto self = weak.lock()) self->StageMade(std::move(*made), std::move(*share));
    });
  });
  return OkStatus();
}

void RankMemory::StageMade(Result<std::unique_ptr<memory::StageBuffers>> made,
                           Budget::Share share) {
  making_stage_ = false;
  WW_FAILPOINT("agent.after_stage_made");
  Status status;
  if (made) {
    stage_ = std::move(*made);
    stage_share_ = std::move(share);
  } else {
    status = std::move(made.error()).AtRank(name_);
  }
  for (auto& waiter : std::exchange(stage_waiters_, {})) waiter(status);
}

void RankMemory::MakeGather(const plan::GatherBuffer& gathered, control::Done done) {
  const uint64_t bytes = transfer::GatherBytes(gathered);
  if (bytes == 0 || (gather_ && gather_->size() >= bytes)) return done(OkStatus());
  // A job that still reads the old one keeps it until it ends.
  gather_.reset();
  gather_share_ = {};
  const std::string what = "what " + name_ + " gathers";
  if (gpu_pools_) return GatherMade(gpu_pools_->Allocate(what, bytes), {}, done);
  auto admitted = services_->budget->AdmitStaging(what, bytes);
  if (!admitted) return done(std::move(admitted.error()).AtRank(name_));
  auto share = std::make_shared<Budget::Share>(std::move(*admitted));
  services_->workers.Post([weak = weak_from_this(), share = std::move(share), what, bytes,
                           done = std::move(done), &strand = services_->strand]() mutable {
    auto made = std::make_shared<Result<std::shared_ptr<memory::MemoryRegion>>>(
        memory::MemoryRegion::Allocate(what, bytes));
    strand.Post([weak = std::move(weak), share = std::move(share), made = std::move(made),
                 done = std::move(done)] {
      if (auto self = weak.lock()) self->GatherMade(std::move(*made), std::move(*share), done);
    });
  });
}

void RankMemory::GatherMade(Result<std::shared_ptr<memory::MemoryRegion>> made, Budget::Share share,
                            const control::Done& done) {
  if (!made) return done(std::move(made.error()).AtRank(name_));
  gather_ = std::move(*made);
  gather_share_ = std::move(share);
  done(OkStatus());
}

Result<StageInfo> RankMemory::OpenStage() {
  WW_FAIL_IF_ERROR(StartStage());
  if (!stage_) {
    return Fail(Code::kUnavailable, Reason::kNotReady, "the stage is being made; call again");
  }
  return StageInfo{stage_->arena(), stage_->regions()};
}

epoch::Contents RankMemory::held() const {
  return stage_ ? ContentsOf(stage_->held()) : epoch::Contents{};
}

epoch::Contents RankMemory::held_beyond() const {
  return stage_ ? ContentsOf(stage_->held_beyond()) : epoch::Contents{};
}

transfer::Binding RankMemory::StageBinding(int buffer) const {
  return ArenaBinding(stage_->arena(), stage_->regions()[static_cast<size_t>(buffer)]);
}

transfer::Binding RankMemory::TargetBinding(int buffer, const plan::GatherBuffer& gathered) const {
  transfer::Binding binding = StageBinding(buffer);
  const auto bytes = static_cast<uint64_t>(plan::GatherBufferBytes(gathered));
  if (bytes > 0) binding.push_back({gather_, 0, bytes});
  return binding;
}

}  // namespace weightwire::agent
