#pragma once

#include <memory>
#include <string>
#include <vector>

#include "server/coordinator/coordinator.h"
#include "server/daemon/http_server.h"
#include "server/plan/plan.h"

namespace weightwire::daemon {

/// The status page, status_page.html, and what it is fed with. All of it is pure but for the
/// page's nonce, and may run on any thread: with thousands of ranks the JSON takes milliseconds.

inline constexpr char kStatusDocument[] = "/api/status";
inline constexpr char kPageDocument[] = "/api/page";
inline constexpr char kPlansDocument[] = "/api/plans";
inline constexpr char kLinksDocument[] = "/api/links";

/// The page with a policy that lets its own script and style run and nothing else, and lets it ask
/// no other host. A nonce of its own in each reply.
HttpReply StatusPage();
/// v1.StatusResponse as `wwctl status --json` has it: every field, the proto's names.
HttpReply StatusDocument(const coordinator::StatusSnapshot& snapshot);
/// The same for the page: every epoch that is remembered, with numbers for engines, and the ranks
/// that it shows.
HttpReply PageDocument(const coordinator::StatusSnapshot& snapshot);
coordinator::StatusQuery StatusDocumentQuery();
coordinator::StatusQuery PageDocumentQuery();
/// A plan of the newest published version, with the engines that are filled by it: exactly these,
/// unless another plan of the version fits as many ranks (`certain` is false then).
struct ShownPlan {
  std::shared_ptr<const plan::TransferPlan> plan;
  std::vector<std::string> engines;
  bool certain = true;
};
/// On the coordinator's strand. Plans that it has forgotten are left out.
std::vector<ShownPlan> NewestPlans(const coordinator::Coordinator& coordinator);
/// Who sends how much to whom: {"plans": [{id, engines, certain, source_ranks, target_ranks,
/// bytes_total, copies_total, source_step, target_step, rows}]}. A row is `source_step` source
/// ranks, a number in it the bytes that they send to `target_step` target ranks; at most 32 × 32
/// numbers.
HttpReply PlansDocument(const std::vector<ShownPlan>& plans);
/// Who read how much from whom, and for how long: {"epochs": [{epoch, version, left_off, links:
/// [{source, target, transport, bytes, seconds}]}]}, as Coordinator::Edges has it.
HttpReply LinksDocument(const std::vector<coordinator::EpochEdges>& epochs);

}  // namespace weightwire::daemon
