#include "server/daemon/status_documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "server/daemon/status_page.h"
#include "server/rpc/random.h"
#include "server/rpc/status_message.h"
#include "server/rpc/trace.h"
#include "server/wire/json.h"

namespace weightwire::daemon {
namespace {

using nlohmann::json;

constexpr char kJsonType[] = "application/json";
constexpr std::string_view kNoncePlace = "{{nonce}}";
constexpr uint32_t kMatrixSide = 32;
constexpr size_t kEpochsOfDocument = 16;  ///< as `wwctl status --json` has without --epochs
constexpr size_t kRanksOfPage = 1'024;

uint32_t Divided(uint32_t count, uint32_t by) { return (count + by - 1) / by; }

json MatrixOf(const plan::TransferPlan& plan) {
  const uint32_t source_step = std::max(1u, Divided(plan.source_ranks, kMatrixSide));
  const uint32_t target_step = std::max(1u, Divided(plan.target_ranks, kMatrixSide));
  std::vector<std::vector<int64_t>> rows(
      Divided(plan.source_ranks, source_step),
      std::vector<int64_t>(Divided(plan.target_ranks, target_step), 0));
  for (const plan::Stream& stream : plan.streams) {
    rows[stream.source_rank / source_step][stream.target_rank / target_step] += stream.bytes;
  }
  return {{"id", plan.id.ToHex()},
          {"source_ranks", plan.source_ranks},
          {"target_ranks", plan.target_ranks},
          {"bytes_total", plan.bytes_total},
          {"copies_total", plan.copies_total},
          {"source_step", source_step},
          {"target_step", target_step},
          {"rows", rows}};
}

HttpReply JsonReply(const json& document) {
  HttpReply reply;
  reply.content_type = kJsonType;
  // Names come from outside and need not be UTF-8.
  reply.body = document.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  return reply;
}

}  // namespace

HttpReply StatusPage() {
  rpc::TraceId random{};
  rpc::RandomBytes(random.data(), random.size());
  const std::string nonce = rpc::TraceHex(random);
  HttpReply reply{.content_type = "text/html; charset=utf-8", .body = std::string(kStatusPage)};
  for (size_t at = 0; (at = reply.body.find(kNoncePlace, at)) != std::string::npos;) {
    reply.body.replace(at, kNoncePlace.size(), nonce);
  }
  reply.policy = "default-src 'none'; script-src 'nonce-" + nonce + "'; style-src 'nonce-" + nonce +
                 "'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                 "frame-ancestors 'none'";
  return reply;
}

HttpReply StatusDocument(const coordinator::StatusSnapshot& snapshot) {
  return {.content_type = kJsonType, .body = wire::JsonText(rpc::StatusMessageOf(snapshot)) + "\n"};
}

HttpReply PageDocument(const coordinator::StatusSnapshot& snapshot) {
  const v1::StatusResponse message = rpc::StatusMessageOf(snapshot, rpc::EngineForm::kRuns);
  return {.content_type = kJsonType, .body = wire::JsonText(message) + "\n"};
}

coordinator::StatusQuery StatusDocumentQuery() {
  return {.epochs_max = kEpochsOfDocument, .lines_max = rpc::kWaitingLinesMax};
}

coordinator::StatusQuery PageDocumentQuery() {
  return {
      .names_bounded = false, .lines_max = rpc::kWaitingLinesMax, .participants_max = kRanksOfPage};
}

std::vector<ShownPlan> NewestPlans(const coordinator::Coordinator& coordinator) {
  const coordinator::StatusSnapshot snapshot =
      coordinator.Snapshot({.names_bounded = false, .lines_max = 0, .participants_max = 0});
  const auto newest = std::find_if(snapshot.epochs.begin(), snapshot.epochs.end(), [](auto& epoch) {
    return epoch.kind == epoch::Kind::kPublish && !epoch.plans.empty();
  });
  std::vector<ShownPlan> shown;
  if (newest == snapshot.epochs.end()) return shown;
  for (const PlanId& id : newest->plans) {
    if (auto plan = coordinator.FindPlan(id)) shown.push_back({std::move(*plan), {}, true});
  }
  const std::unordered_set<std::string> names(newest->engines.begin(), newest->engines.end());
  for (const auto& engine : snapshot.engines) {
    if (!names.contains(engine.name)) continue;
    auto fits = [&](const ShownPlan& it) { return it.plan->target_ranks == engine.world_size; };
    const bool certain = std::count_if(shown.begin(), shown.end(), fits) == 1;
    for (ShownPlan& it : shown) {
      if (!fits(it)) continue;
      it.engines.push_back(engine.name);
      it.certain = it.certain && certain;
    }
  }
  return shown;
}

HttpReply PlansDocument(const std::vector<ShownPlan>& plans) {
  json list = json::array();
  for (const ShownPlan& shown : plans) {
    list.push_back(MatrixOf(*shown.plan));
    list.back()["engines"] = shown.engines;
    list.back()["certain"] = shown.certain;
  }
  return JsonReply({{"plans", std::move(list)}});
}

HttpReply LinksDocument(const std::vector<coordinator::EpochEdges>& epochs) {
  json list = json::array();
  for (const coordinator::EpochEdges& epoch : epochs) {
    json links = json::array();
    for (const coordinator::TransferEdge& link : epoch.edges) {
      links.push_back({{"source", link.source},
                       {"target", link.target},
                       {"transport", link.transport},
                       {"bytes", link.bytes},
                       {"seconds", link.seconds}});
    }
    list.push_back({{"epoch", epoch.epoch.value},
                    {"version", epoch.version.value},
                    {"left_off", epoch.left_off},
                    {"links", std::move(links)}});
  }
  return JsonReply({{"epochs", std::move(list)}});
}

}  // namespace weightwire::daemon
