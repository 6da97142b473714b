#include "tests/unit/transfer/fleet.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "server/plan/relayed.h"
#include "server/transfer/staging.h"
#include "tests/support/fake_cuda/fake_gpus.h"

namespace weightwire::transfer::testing {
namespace {

constexpr Nanos kLong = std::chrono::minutes(10);

Ticket TicketOf(size_t target_agent) {
  return {7, static_cast<uint8_t>(target_agent), static_cast<uint8_t>(target_agent >> 8)};
}

std::string NameOf(std::string_view name, metrics::Labels labels) {
  if (labels.empty()) return std::string(name);
  std::ranges::sort(labels);
  std::string text;
  for (const auto& [key, value] : labels) {
    text += (text.empty() ? "" : ",") + key + "=" + value;
  }
  return std::string(name) + "{" + text + "}";
}

/// As a NIC whose writes the GPU does not see in time.
Status WriteLate(device::Bytes target, device::ConstBytes source, uint64_t bytes) {
  static const auto write = FAKE_CALL(fake_cuda_write_late);
  std::vector<std::byte> here(bytes);
  WW_RETURN_IF_ERROR(device::CopyRun({here.data()}, source, bytes));
  write(target.at, here.data(), bytes);
  return OkStatus();
}

/// Room on one GPU for all ranks of a side (MakeMemory), and for slots and scratch.
uint64_t SlabFor(const std::vector<std::vector<uint64_t>>& tensor_bytes, uint32_t engines,
                 const Tuning& tuning) {
  constexpr uint64_t kBetween = 512;  // tensors, and ranges of the GPU pool
  uint64_t bytes = 0;
  for (const auto& rank : tensor_bytes) {
    for (uint64_t tensor : rank) bytes += tensor + kBetween;
  }
  return engines * bytes + GpuPoolBytes(tuning) + 2 * kBetween;
}

void ExpectDigestsAgree(const Fleet& fleet, uint32_t engines) {
  std::map<uint32_t, uint64_t> by_stream;
  for (const auto& source : fleet.sources) {
    for (const StreamDigest& digest : (*source.result)->digests) {
      EXPECT_EQ(digest.plan, fleet.plan.plan.id);
      EXPECT_TRUE(by_stream.emplace(digest.stream, digest.digest).second);
    }
  }
  EXPECT_EQ(by_stream.size(), fleet.plan.plan.streams.size());
  size_t seen = 0;
  for (const auto& target : fleet.targets) {
    for (const StreamDigest& digest : (*target.result)->digests) {
      EXPECT_EQ(by_stream.at(digest.stream), digest.digest);
      ++seen;
    }
  }
  EXPECT_EQ(seen, engines * fleet.plan.plan.streams.size());
}

}  // namespace

void CountingSink::Add(std::string_view counter, double amount, const metrics::Labels& labels) {
  counts_[NameOf(counter, labels)] += amount;
}
void CountingSink::Observe(std::string_view histogram, double, const metrics::Labels& labels) {
  counts_[NameOf(histogram, labels)] += 1;
}
double CountingSink::Count(const std::string& name) const {
  auto entry = counts_.find(name);
  return entry == counts_.end() ? 0 : entry->second;
}

Tuning SmallTuning() {
  Tuning tuning;
  tuning.segment_bytes_max = 1'000;
  tuning.slot_bytes = 8'192;
  tuning.slots_in_pool = 6;
  tuning.window = 4;
  tuning.gets_in_flight = 8;
  tuning.chunk_bytes = 3'000;
  tuning.direct_run_bytes_min = 100;
  return tuning;
}

Fleet::Agent Fleet::MakeAgent(const FleetOptions& options, const std::string& address,
                              uint64_t incarnation, bool map,
                              const std::optional<Placement>& placement, uint64_t slab_bytes) {
  Agent agent;
  agent.address = address;
  agent.incarnation = Incarnation(incarnation);
  transport::FakeOptions fake;
  fake.map = map;
  fake.notifies_queued_max = options.notifies_queued_max;
  fake.gets_device_memory = placement && placement->gets_device_memory;
  fake.flush_device_writes = options.flush_device_writes;
  if (options.late_nic) fake.write_device = WriteLate;
  agent.transport = network.MakeTransport(address, fake);
  std::vector<transport::Transport*> transports = {agent.transport.get()};
  if (options.odd_targets_read_plain) {
    transport::FakeOptions plain;
    plain.name = kPlain;
    agent.plain = network.MakeTransport(address + "-plain", plain);
    transports.push_back(agent.plain.get());
  }
  if (placement) {
    const auto gpu = weightwire::testing::FakeDevice(placement->gpu.value_or(0));
    if (placement->slab_bytes > 0) slab_bytes = placement->slab_bytes;
    agent.gpu_pools.by_device.emplace(gpu->uuid(),
                                      memory::GpuMemoryPool::Make(gpu, slab_bytes).value());
  }
  Options engine;
  engine.tuning = options.tuning;
  engine.host = address;
  engine.self = agent.incarnation;
  engine.preference = {"fake", kPlain};
  engine.proof_required = options.proof_required;
  engine.gpu_pools = agent.gpu_pools;
  engine.gpu_direct_required =
      options.gpu_direct_required && (address[0] == 's' || options.targets_require_gpu_direct);
  agent.engine = Engine::Make(engine, sim, sim, sim, transports, metrics).value();
  return agent;
}

void Fleet::Place(RankMemory& memory, const Agent& agent,
                  const std::optional<Placement>& placement) {
  if (!placement || !placement->gpu) return;
  memory = OnDevice(memory, *agent.gpu_pools.by_device.begin()->second);
}

Fleet::Fleet(const FleetOptions& options)
    : rng(options.seed),
      network(sim, sim, options.seed),
      plan(options.stream_bytes.empty() ? MakeRandomPlan(rng, options.shape)
                                        : MakeSizedPlan(options.stream_bytes)),
      odd_targets_read_plain(options.odd_targets_read_plain) {
  network.SetDefaultLink(options.link);
  const uint64_t source_slab = SlabFor(plan.source_tensor_bytes, 1, options.tuning);
  const uint64_t target_slab = SlabFor(plan.target_tensor_bytes, options.engines, options.tuning);
  for (uint32_t i = 0; i < options.source_agents; ++i) {
    source_agents.push_back(MakeAgent(options, "s" + std::to_string(i), 100 + i, options.map,
                                      options.sources_on, source_slab));
  }
  for (uint32_t i = 0; i < options.target_agents; ++i) {
    const bool map = options.map && (options.odd_targets_map || i % 2 == 0);
    target_agents.push_back(
        MakeAgent(options, "t" + std::to_string(i), 200 + i, map, options.targets_on, target_slab));
    for (auto& agent : source_agents) {
      agent.engine->AdmitTicket(TicketOf(i), target_agents[i].incarnation);
    }
  }
  for (uint32_t rank = 0; rank < options.shape.source_ranks; ++rank) {
    source_memory.push_back(MakeMemory(rng, plan.source_tensor_bytes[rank]));
    TameFloats(rng, plan.plan, rank, source_memory.back());
    Source source;
    source.agent = rank % options.source_agents;
    source.job.epoch = Epoch(5);
    source.job.participant = ParticipantId(10 + rank);
    source.job.name = "trainer/" + std::to_string(rank);
    source.job.assignments = {
        {std::make_shared<plan::RankSlice>(plan::SliceOf(plan.plan, plan::Side::kSource, rank)),
         options.chain ? 1 : options.engines}};
    source.job.heads = std::make_shared<Heads>();
    sources.push_back(std::move(source));
  }
  for (uint32_t e = 0; e < options.engines; ++e) {
    for (uint32_t rank = 0; rank < options.shape.target_ranks; ++rank) {
      Target target;
      target.rank = rank;
      target.agent = targets.size() % options.target_agents;
      target.memory = MakeMemory(rng, plan.target_tensor_bytes[rank]);
      target.before = target.memory.Snapshot();
      target.expected = Expected(plan.plan, rank, target.memory, source_memory);
      Place(target.memory, target_agents[target.agent], options.targets_on);
      target.job.epoch = Epoch(5);
      target.job.participant = ParticipantId(1'000 + static_cast<uint32_t>(targets.size()));
      target.job.name = "engine-" + std::to_string(e) + "/" + std::to_string(rank);
      target.job.slice =
          std::make_shared<plan::RankSlice>(plan::SliceOf(plan.plan, plan::Side::kTarget, rank));
      target.job.binding = target.memory.binding;
      target.job.sources = Direct(target.agent);
      for (uint32_t s = 0; s < options.shape.source_ranks; ++s) {
        target.job.source_participants.emplace(s, sources[s].job.participant);
      }
      targets.push_back(std::move(target));
      const size_t ranks = options.shape.target_ranks;
      if (options.chain && e > 0) Relay(targets[targets.size() - 1 - ranks], targets.back());
    }
  }
  for (uint32_t rank = 0; rank < options.shape.source_ranks; ++rank) {
    Place(source_memory[rank], source_agents[sources[rank].agent], options.sources_on);
    sources[rank].job.binding = source_memory[rank].binding;
  }
}

std::map<uint32_t, Peer> Fleet::Direct(size_t target_agent) const {
  std::map<uint32_t, Peer> peers;
  for (uint32_t s = 0; s < sources.size(); ++s) {
    peers.emplace(s, PeerOf(source_agents[sources[s].agent], target_agent));
  }
  return peers;
}

Peer Fleet::PeerOf(const Agent& agent, size_t reader) const {
  Peer peer;
  peer.agent = AgentId(static_cast<uint32_t>(agent.incarnation.value));
  peer.incarnation = agent.incarnation;
  peer.host = agent.address;
  if (odd_targets_read_plain && reader % 2 == 1) {
    peer.addresses = {{kPlain, agent.address + "-plain"}};
  } else {
    peer.addresses = {{"fake", agent.address}};
  }
  peer.ticket = TicketOf(reader);
  return peer;
}

void Fleet::Relay(Target& parent, Target& child) {
  const plan::RankSlice slice = plan::SliceOf(plan.plan, plan::Side::kTarget, parent.rank);
  parent.job.received = std::make_shared<SlotBitmap>();
  SourceJob relay;
  relay.epoch = parent.job.epoch;
  relay.participant = parent.job.participant;
  relay.name = parent.job.name;
  relay.binding = parent.job.binding;
  relay.assignments = {
      {std::make_shared<plan::RankSlice>(plan::RelayedSlice(slice, plan::Side::kSource)), 1}};
  relay.received = parent.job.received;
  parent.relay = std::move(relay);
  child.job.slice =
      std::make_shared<plan::RankSlice>(plan::RelayedSlice(slice, plan::Side::kTarget));
  const Agent& agent = target_agents[parent.agent];
  agent.engine->AdmitTicket(TicketOf(child.agent), target_agents[child.agent].incarnation);
  for (auto& [rank, peer] : child.job.sources) {
    peer = PeerOf(agent, child.agent);
    child.job.source_participants[rank] = parent.job.participant;
  }
}

Fleet::~Fleet() {
  if (!ended_) End();
  for (auto* agents : {&source_agents, &target_agents}) {
    for (Agent& agent : *agents) {
      agent.transport.reset();
      agent.plain.reset();
    }
  }
}

void Fleet::StartSource(size_t i) {
  Source& source = sources[i];
  EngineOf(source).StartSource(source.job, [&source](Result<SourceReport> result) {
    ++source.done_calls;
    source.result = std::move(result);
  });
}
void Fleet::StartTarget(size_t i) {
  Target& target = targets[i];
  if (target.relay) {
    EngineOf(target).StartSource(
        *target.relay, [&target](const Result<SourceReport>&) { ++target.relay_done_calls; });
  }
  EngineOf(target).StartTarget(target.job, [&target](Result<TargetReport> result) {
    ++target.done_calls;
    target.result = std::move(result);
  });
}
void Fleet::StartAll() {
  for (size_t i = 0; i < sources.size(); ++i) StartSource(i);
  for (size_t i = 0; i < targets.size(); ++i) StartTarget(i);
}

void Fleet::DrainSource(size_t i) {
  Source& source = sources[i];
  EngineOf(source).Drain(source.job.epoch, source.job.participant,
                         [&source] { source.drained = true; });
}
void Fleet::DrainTarget(size_t i) {
  Target& target = targets[i];
  EngineOf(target).Drain(target.job.epoch, target.job.participant,
                         [&target] { target.drained = true; });
}

void Fleet::RunToResults() {
  const bool all = sim.RunUntil(
      [this] {
        return std::ranges::all_of(sources, [](auto& s) { return s.result.has_value(); }) &&
               std::ranges::all_of(targets, [](auto& t) { return t.result.has_value(); });
      },
      kLong);
  EXPECT_TRUE(all) << "a job never ended";
}

void Fleet::End() {
  ended_ = true;
  for (size_t i = 0; i < sources.size(); ++i) DrainSource(i);
  for (size_t i = 0; i < targets.size(); ++i) DrainTarget(i);
  const bool drained = sim.RunUntil(
      [this] {
        return std::ranges::all_of(sources, [](auto& s) { return s.drained; }) &&
               std::ranges::all_of(targets, [](auto& t) { return t.drained; });
      },
      kLong);
  EXPECT_TRUE(drained) << "a job never drained";
  size_t shut = 0;
  for (auto* agents : {&source_agents, &target_agents}) {
    for (Agent& agent : *agents) agent.engine->Shutdown([&shut] { ++shut; });
  }
  const size_t all = source_agents.size() + target_agents.size();
  EXPECT_TRUE(sim.RunUntil([&] { return shut == all; }, kLong)) << "an engine never shut down";
  sim.RunUntilIdle();
  for (Source& source : sources) EXPECT_LE(source.done_calls, 1);
  for (Target& target : targets) {
    EXPECT_LE(target.done_calls, 1);
    EXPECT_LE(target.relay_done_calls, 1);
  }
}

// ---- helpers of the tests
// -------------------------------------------------------------------------

void NextAttempt(Fleet& fleet, Epoch epoch) {
  for (size_t i = 0; i < fleet.sources.size(); ++i) fleet.DrainSource(i);
  for (size_t i = 0; i < fleet.targets.size(); ++i) fleet.DrainTarget(i);
  ASSERT_TRUE(fleet.sim.RunUntil(
      [&] {
        return std::ranges::all_of(fleet.sources, [](auto& s) { return s.drained; }) &&
               std::ranges::all_of(fleet.targets, [](auto& t) { return t.drained; });
      },
      std::chrono::minutes(10)));
  fleet.sim.RunFor(std::chrono::seconds(1));  // every end learns of the sessions that broke
  for (auto& source : fleet.sources) {
    source.job.epoch = epoch;
    source.result.reset();
    source.drained = false;
    source.done_calls = 0;
  }
  for (auto& target : fleet.targets) {
    target.job.epoch = epoch;
    target.result.reset();
    target.drained = false;
    target.done_calls = target.relay_done_calls = 0;
    if (!target.relay) continue;
    target.job.received = std::make_shared<SlotBitmap>();
    target.relay->received = target.job.received;
    target.relay->epoch = epoch;
  }
}

HandReader::HandReader(Fleet& fleet, const Fleet::Agent& agent, const SourceJob& job,
                       Incarnation self, uint64_t features)
    : fleet_(fleet), job_(job) {
  const std::string name = "reader " + std::to_string(self.value);
  const Ticket ticket = {9, static_cast<uint8_t>(self.value)};
  transport_ = fleet.network.MakeTransport(name);
  EXPECT_TRUE(transport_->Start(this, self).ok());
  agent.engine->AdmitTicket(ticket, self);
  transport::Hello hello;
  hello.features = features;
  hello.caller = self;
  hello.callee = agent.incarnation;
  hello.ticket = ticket;
  transport_->Connect(agent.address, hello, std::chrono::seconds(1),
                      [this](auto result) { endpoint_ = std::move(result).value(); });
  fleet.sim.RunFor(std::chrono::seconds(1));
}

HandReader::~HandReader() {
  endpoint_->Close();
  fleet_.sim.RunFor(std::chrono::seconds(1));
  endpoint_.reset();
  transport_.reset();
  fleet_.sim.RunFor(std::chrono::seconds(1));
}

void HandReader::OnNotify(const std::shared_ptr<transport::Endpoint>&,
                          std::span<const std::byte> message) {
  heard.push_back(DecodeNotify(message).value());
}

StreamKey HandReader::KeyOf(ParticipantId as) const {
  return {job_.epoch, fleet_.plan.plan.id.low, 0, job_.participant, as};
}

void HandReader::Send(const Notify& notify) {
  EXPECT_TRUE(endpoint_->Notify(EncodeNotify(notify).span()).ok());
}

void HandReader::Open(ParticipantId as) {
  Notify open;
  open.type = NotifyType::kOpen;
  open.key = KeyOf(as);
  open.plan_high = fleet_.plan.plan.id.high;
  open.segment_bytes_max = static_cast<uint64_t>(SmallTuning().segment_bytes_max);
  open.slot_bytes = static_cast<uint64_t>(SmallTuning().slot_bytes);
  Send(open);
}

void HandReader::Credit(ParticipantId as, uint32_t slot) {
  Notify credit;
  credit.type = NotifyType::kCredit;
  credit.key = KeyOf(as);
  credit.slot = slot;
  Send(credit);
}

Versions::Versions(const FleetOptions& options) : fleet(options), engines(options.engines) {
  for (auto& target : fleet.targets) {
    spare.push_back(MakeMemory(fleet.rng, fleet.plan.target_tensor_bytes[target.rank]));
    kept.push_back(std::make_shared<Kept>());
  }
}

void Versions::TellGenerations() {
  for (auto& source : fleet.sources) {
    source.job.generations.assign(source.job.binding.size(), 1);
    source.job.served = std::make_shared<std::map<PlanId, ServedSums>>();
  }
}

void Versions::Code(DeltaPolicy policy, DeltaBases::Admit admit) {
  for (auto& source : fleet.sources) {
    source.job.delta = std::make_shared<DeltaBases>(policy, admit);
  }
}

void Versions::Prepare(const std::vector<RankMemory>& then) {
  for (size_t i = 0; i < fleet.targets.size(); ++i) {
    Fleet::Target& target = fleet.targets[i];
    if (version > 0) {
      std::swap(target.memory, spare[i]);
      std::swap(target.job.kept, kept[i]);
      target.job.binding = target.memory.binding;
      target.job.served = spare[i].binding;
      target.job.served_kept = kept[i];
      if (target.relay) target.relay->binding = target.job.binding;
    }
    target.expected = Expected(fleet.plan.plan, target.rank, target.memory, then);
  }
  if (version++ > 0) NextAttempt(fleet, Epoch(5 + 10 * version));
}

void Versions::Next(const std::vector<RankMemory>& then) {
  Prepare(then);
  fleet.StartAll();
  ExpectArrived(fleet, engines);
}

void Versions::Touch(const plan::Stream& stream, const plan::CopyOp& op) {
  const auto& tensor = fleet.source_memory[stream.source_rank].binding[op.source_tensor];
  tensor.data()[op.source_offset * layout::ElementBytes(op.source_dtype)] ^= std::byte{1};
}

uint64_t StartAfterLosses(Fleet& fleet, const FleetOptions& options, std::mt19937_64& rng) {
  constexpr uint64_t kLosses = 3;
  uint64_t losses = 0;
  for (; losses < kLosses; ++losses) {
    fleet.StartAll();
    const uint32_t steps = Below(rng, 1'500);
    for (uint32_t i = 0; i < steps && fleet.sim.RunOne(); ++i) {
    }
    const std::string reader = "t" + std::to_string(Below(rng, options.target_agents));
    for (uint32_t s = 0; s < options.source_agents; ++s) {
      fleet.network.Break(reader, "s" + std::to_string(s));
    }
    for (uint32_t t = 0; t < options.target_agents; ++t) {
      fleet.network.Break(reader, "t" + std::to_string(t));
    }
    NextAttempt(fleet, Epoch(6 + losses));
    if (::testing::Test::HasFatalFailure()) return losses;
  }
  fleet.StartAll();
  return losses;
}

void ExpectBytes(Fleet& fleet) {
  fleet.RunToResults();
  for (auto& target : fleet.targets) {
    ASSERT_TRUE(target.result->has_value()) << target.result->error().ToString();
    ASSERT_EQ(target.memory.Snapshot(), target.expected);
  }
}

void ExpectArrived(Fleet& fleet, uint32_t engines) {
  ExpectBytes(fleet);
  if (::testing::Test::HasFailure()) return;
  int64_t bytes = 0;
  for (auto& target : fleet.targets) bytes += (*target.result)->bytes;
  EXPECT_EQ(bytes, fleet.plan.plan.bytes_total * engines);
  for (auto& source : fleet.sources) {
    ASSERT_TRUE(source.result->has_value()) << source.result->error().ToString();
  }
  ExpectDigestsAgree(fleet, engines);
}

FleetOptions RandomFleet(uint64_t seed) {
  std::mt19937_64 rng(seed * 7919);
  FleetOptions options;
  options.seed = seed;
  options.shape.source_ranks = 1 + Below(rng, 4);
  options.shape.target_ranks = 1 + Below(rng, 3);
  options.shape.quantized_ops_per_stream = static_cast<int>(seed % 4);
  options.shape.gathered_per_target = static_cast<int>(seed % 3);
  options.engines = 1 + Below(rng, 3);
  options.source_agents = 1 + Below(rng, options.shape.source_ranks);
  options.target_agents = 1 + Below(rng, 3);
  options.map = Below(rng, 2) == 0;
  options.chain = Below(rng, 2) == 0;
  options.tuning.segment_bytes_max = 64 + Below(rng, 2'000);
  options.tuning.slots_in_pool = 1 + Below(rng, 6);
  options.tuning.window = 1 + Below(rng, 4);
  options.tuning.mapped_window = 1 + Below(rng, 8);
  options.tuning.gets_in_flight = 1 + Below(rng, 8);
  options.tuning.chunk_bytes = 1 + Below(rng, 8'000);
  options.tuning.direct_run_bytes_min = 1 + Below(rng, 300);
  const auto slot = static_cast<uint64_t>(options.tuning.slot_bytes);
  options.tuning.rate_limit = slot * Below(rng, 3) * 50;
  options.tuning.peer_rate_limit = slot * Below(rng, 3) * 25;
  options.link.latency = std::chrono::microseconds(Below(rng, 200));
  options.link.get_jitter_max = std::chrono::microseconds(Below(rng, 500));
  if (Below(rng, 2) == 0) options.link.bytes_per_second = 1 << (14 + Below(rng, 10));
  return options;
}

int64_t BytesKept(const Fleet& fleet) {
  int64_t bytes = 0;
  for (const auto& target : fleet.targets) bytes += (*target.result)->bytes_kept;
  return bytes;
}

int64_t BytesMoved(const Fleet& fleet) {
  int64_t bytes = 0;
  for (const auto& target : fleet.targets) {
    for (const auto& [name, moved] : (*target.result)->bytes_by_transport) bytes += moved;
  }
  return bytes;
}

FleetOptions LosingFleet(uint64_t seed) {
  std::mt19937_64 rng(seed * 104'729);
  FleetOptions options;
  options.seed = seed;
  options.shape.source_ranks = 1 + Below(rng, 3);
  options.shape.target_ranks = 1 + Below(rng, 2);
  options.shape.elements_per_op_max = 10'000;
  options.shape.quantized_ops_per_stream = 2;
  options.shape.gathered_per_target = 2;
  options.source_agents = 1 + Below(rng, options.shape.source_ranks);
  options.engines = 1 + Below(rng, 3);
  options.chain = Below(rng, 2) == 0;
  options.target_agents = options.engines * options.shape.target_ranks;
  options.link.latency = std::chrono::microseconds(Below(rng, 200));
  options.link.get_jitter_max = std::chrono::microseconds(Below(rng, 500));
  options.link.bytes_per_second = 1 << (16 + Below(rng, 6));
  return options;
}

}  // namespace weightwire::transfer::testing
