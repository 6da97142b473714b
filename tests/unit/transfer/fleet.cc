#include "tests/unit/transfer/fleet.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "server/plan/relayed.h"

namespace weightwire::transfer::testing {
namespace {

constexpr Nanos kLong = std::chrono::minutes(10);

Ticket TicketOf(size_t target_agent) { return {7, static_cast<uint8_t>(target_agent)}; }

std::string NameOf(std::string_view name, metrics::Labels labels) {
  if (labels.empty()) return std::string(name);
  std::ranges::sort(labels);
  std::string text;
  for (const auto& [key, value] : labels) {
    text += (text.empty() ? "" : ",") + key + "=" + value;
  }
  return std::string(name) + "{" + text + "}";
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
                              uint64_t incarnation, bool map) {
  Agent agent;
  agent.address = address;
  agent.incarnation = Incarnation(incarnation);
  transport::FakeOptions fake;
  fake.map = map;
  fake.notifies_queued_max = options.notifies_queued_max;
  agent.transport = network.MakeTransport(address, fake);
  Options engine;
  engine.tuning = options.tuning;
  engine.host = address;
  engine.self = agent.incarnation;
  engine.preference = {"fake"};
  engine.proof_required = options.proof_required;
  agent.engine = Engine::Make(engine, sim, sim, sim, {agent.transport.get()}, metrics).value();
  return agent;
}

Fleet::Fleet(const FleetOptions& options)
    : rng(options.seed),
      network(sim, sim, options.seed),
      plan(options.stream_bytes.empty() ? MakeRandomPlan(rng, options.shape)
                                        : MakeSizedPlan(options.stream_bytes)) {
  network.SetDefaultLink(options.link);
  for (uint32_t i = 0; i < options.source_agents; ++i) {
    source_agents.push_back(MakeAgent(options, "s" + std::to_string(i), 100 + i, options.map));
  }
  for (uint32_t i = 0; i < options.target_agents; ++i) {
    const bool map = options.map && (options.odd_targets_map || i % 2 == 0);
    target_agents.push_back(MakeAgent(options, "t" + std::to_string(i), 200 + i, map));
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
    source.job.legs = {
        {std::make_shared<plan::RankSlice>(plan::SliceOf(plan.plan, plan::Side::kSource, rank)),
         options.chain ? 1 : options.engines}};
    source.job.binding = source_memory.back().binding;
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
  peer.addresses = {{"fake", agent.address}};
  peer.ticket = TicketOf(reader);
  return peer;
}

void Fleet::Relay(Target& parent, Target& child) {
  const plan::RankSlice slice = plan::SliceOf(plan.plan, plan::Side::kTarget, parent.rank);
  parent.job.received = std::make_shared<Received>();
  SourceJob relay;
  relay.epoch = parent.job.epoch;
  relay.participant = parent.job.participant;
  relay.name = parent.job.name;
  relay.binding = parent.job.binding;
  relay.legs = {
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
    for (Agent& agent : *agents) agent.transport.reset();
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

}  // namespace weightwire::transfer::testing
