#include "client/cli/simulate_tool.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>
#include <vector>

#include "client/cli/offline.h"
#include "client/cli/table.h"
#include "server/base/bytes_text.h"
#include "server/plan/simulate.h"

namespace weightwire::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kBarWidth = 40;

plan::LinkModel ModelOf(const SimulateRequest& request) {
  plan::LinkModel model;
  model.bytes_per_second = request.gigabits_per_second * 1e9 / 8;
  model.latency_seconds = request.latency_us * 1e-6;
  model.topology = request.topology == "chain"  ? plan::Topology::kChain
                   : request.topology == "tree" ? plan::Topology::kTree
                                                : plan::Topology::kStar;
  model.sharing = request.sharing == "equal" ? plan::Sharing::kEqual : plan::Sharing::kByBytes;
  return model;
}

struct Row {
  int64_t sends = 0;
  int64_t receives = 0;
  double end = 0;
};

std::string Bar(double end, double whole) {
  const int filled = whole > 0 ? static_cast<int>(std::lround(end / whole * kBarWidth)) : 0;
  return std::string(static_cast<size_t>(filled), '#');
}

/// Ranks with equal bytes that end within half a per cent of each other share a line.
void AddRows(const char* side, const std::vector<Row>& rows, double whole, Table& table) {
  std::map<std::tuple<long, int64_t, int64_t>, std::vector<uint32_t>> groups;
  for (uint32_t rank = 0; rank < rows.size(); ++rank) {
    const long step = whole > 0 ? std::lround(rows[rank].end / whole * 200) : 0;
    groups[{-step, rows[rank].sends, rows[rank].receives}].push_back(rank);
  }
  for (const auto& [key, ranks] : groups) {
    const Row& row = rows[ranks[0]];
    table.Add({std::string(side) + "/" + RanksText(ranks), BytesText(row.sends),
               BytesText(row.receives), SecondsText(row.end), Bar(row.end, whole)});
  }
}

Json RowsJson(const char* side, const std::vector<Row>& rows) {
  Json json = Json::array();
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    json.push_back({{"rank", std::string(side) + "/" + std::to_string(rank)},
                    {"sends_bytes", rows[rank].sends},
                    {"receives_bytes", rows[rank].receives},
                    {"end_seconds", rows[rank].end}});
  }
  return json;
}

}  // namespace

Result<std::string> RunSimulate(const SimulateRequest& request) {
  WW_ASSIGN(const std::string config, ReadConfig(request.config_path));
  WW_ASSIGN(const layout::ModelLayout source, LayoutOf(config, request.from));
  WW_ASSIGN(layout::ModelLayout target, LayoutOf(config, request.to));
  const std::vector<plan::LayoutClass> classes = plan::LayoutClasses(target);
  target = plan::OnePerClass(std::move(target), classes);
  WW_ASSIGN(const plan::TransferPlan plan, plan::BuildPlan(source, target));
  const plan::Simulation result = plan::Simulate(plan, classes, ModelOf(request));

  std::vector<Row> sources;
  for (size_t r = 0; r < result.source_end.size(); ++r) {
    sources.push_back({result.source_egress[r], 0, result.source_end[r]});
  }
  std::vector<Row> targets;
  for (size_t r = 0; r < result.target_end.size(); ++r) {
    targets.push_back({result.target_egress[r], result.target_ingress[r], result.target_end[r]});
  }
  if (request.json) {
    Json timeline = RowsJson("source", sources);
    for (Json& row : RowsJson("target", targets)) timeline.push_back(std::move(row));
    const Json json = {{"seconds", result.seconds},
                       {"bottleneck", result.bottleneck},
                       {"bottleneck_seconds", result.bottleneck_seconds},
                       {"topology", request.topology},
                       {"sharing", request.sharing},
                       {"classes", classes.size()},
                       {"target_ranks", targets.size()},
                       {"timeline", timeline}};
    return json.dump() + "\n";
  }
  Table table({"RANK", "SENDS", "RECEIVES", "ENDS AT", ""});
  AddRows("source", sources, result.seconds, table);
  AddRows("target", targets, result.seconds, table);
  return "predicted: " + SecondsText(result.seconds) + "; bottleneck: " + result.bottleneck +
         ", busy for " + SecondsText(result.bottleneck_seconds) + "\n" + table.Text();
}

}  // namespace weightwire::cli
