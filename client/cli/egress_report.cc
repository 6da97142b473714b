#include "client/cli/egress_report.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "server/coordinator/prepare.h"
#include "server/wire/addresses.h"
#include "server/wire/control.h"
#include "server/wire/slice.h"

namespace weightwire::cli {
namespace {

constexpr uint32_t kRanksPerAgent = 8;
constexpr size_t kPartBytes = 256 << 10;  ///< as the service cuts them
constexpr size_t kUcxAddressBytes = 120;
constexpr const char* kEngine = "engine-0";

struct SliceBytes {
  uint64_t all = 0;
  uint64_t names = 0;
};

SliceBytes BytesOf(const std::shared_ptr<const plan::RankSlice>& slice, bool names_shared) {
  SliceBytes bytes;
  wire::SliceWriter writer(slice, kPartBytes, names_shared);
  for (v1::SlicePart part; writer.Next(&part);) {
    bytes.all += part.ByteSizeLong();
    for (const std::string& name : part.tensor_names()) bytes.names += name.size() + 2;
    bytes.names += static_cast<uint64_t>(part.names_shared_size());
  }
  return bytes;
}

void AddSlices(const plan::TransferPlan& plan, EgressReport& report) {
  for (const auto side : {plan::Side::kSource, plan::Side::kTarget}) {
    const uint32_t ranks = side == plan::Side::kSource ? plan.source_ranks : plan.target_ranks;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const auto slice = std::make_shared<const plan::RankSlice>(plan::SliceOf(plan, side, rank));
      const SliceBytes bytes = BytesOf(slice, true);
      report.slices += bytes.all;
      report.names += bytes.names;
      report.slice_max = std::max(report.slice_max, bytes.all);
      report.old_slices += BytesOf(slice, false).all;
    }
  }
}

epoch::PeerAddress AgentOf(uint32_t member) {
  const uint32_t agent = 1 + member / kRanksPerAgent;
  const std::string number = std::to_string(agent);
  // Incarnations and boot ids are random and long; so are addresses of ucx.
  return {AgentId(agent),
          Incarnation(0x9E3779B97F4A7C15ull * agent),
          "4f1c8d52-7f6b-4a36-9d0e-000000000000/4026531840-" + number,
          {{"tcp", "10.120.130.140:" + std::to_string(40'000 + agent % 20'000)},
           {"ucx", std::string(kUcxAddressBytes - number.size(), 'u') + number}},
          {}};
}

coordinator::PrepareInput InputOf(const plan::TransferPlan& plan) {
  coordinator::PrepareInput input;
  input.spec.epoch = input.spec.content = Epoch(1'000);
  input.spec.version = Version(1'000);
  const auto add = [&](std::vector<epoch::Member>& members, uint32_t ranks) {
    // No agent has ranks of both sides.
    const auto first = static_cast<uint32_t>((input.addresses.size() + kRanksPerAgent - 1) /
                                             kRanksPerAgent * kRanksPerAgent);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      members.push_back({ParticipantId(1 + first + rank),
                         Incarnation(0xD1B54A32D192ED03ull * (1 + first + rank))});
      input.addresses.emplace(members.back(), AgentOf(first + rank));
    }
  };
  add(input.spec.sources, plan.source_ranks);
  input.spec.engines.push_back({kEngine, {}});
  add(input.spec.engines.back().ranks, plan.target_ranks);
  coordinator::PlannedPair pair;
  pair.plan = std::shared_ptr<const plan::TransferPlan>(&plan, [](const auto*) {});
  input.plans.emplace(kEngine, std::make_shared<const coordinator::PlannedPair>(pair));
  return input;
}

void AddPrepares(const plan::TransferPlan& plan, EgressReport& report) {
  const coordinator::PrepareInput input = InputOf(plan);
  uint8_t tickets = 0;
  const auto ticket = [&tickets] { return Ticket{++tickets, 0xA5}; };
  std::map<AgentId, wire::AddressesTold> sessions;
  for (uint64_t* bytes : {&report.first_prepares, &report.next_prepares}) {
    report.old_prepares = 0;
    for (const auto& command : coordinator::MakePrepares(input, ticket)) {
      v1::SessionDown down = wire::ToProto(epoch::Command(command));
      report.old_prepares += down.ByteSizeLong();
      sessions[input.addresses.at(command.member).agent].Shorten(down.mutable_prepare());
      *bytes += down.ByteSizeLong();
    }
  }
}

}  // namespace

EgressReport EgressOf(const plan::TransferPlan& plan) {
  EgressReport report;
  AddSlices(plan, report);
  AddPrepares(plan, report);
  return report;
}

}  // namespace weightwire::cli
