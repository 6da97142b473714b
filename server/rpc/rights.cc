#include "server/rpc/rights.h"

#include <algorithm>
#include <string>

namespace weightwire::rpc {
namespace {

constexpr Right kNo = Right::kNo;
constexpr Right kOwn = Right::kOwnJob;
constexpr Right kYes = Right::kYes;
constexpr tls::Role kColumns[] = {tls::Role::kTrainer, tls::Role::kEngine, tls::Role::kAgent,
                                  tls::Role::kOperator, tls::Role::kMetrics};

// An RPC of the protos that has no row fails rpc_test.
constexpr RightsRow kTable[] = {
    // clang-format off
    //                                                       trainer engine agent operator metrics
    {"/weightwire.v1.Coordinator/Session",                   {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/Register",                  {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/SubmitLayout",              {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/PublishVersion",            {kOwn, kNo, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/WithdrawVersion",           {kOwn, kNo, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/FetchSlice",                {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/Report",                    {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Coordinator/Commit",                    {kOwn, kNo, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Abort",                     {kOwn, kNo, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Rollback",                  {kNo, kNo, kNo, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Verify",                    {kOwn, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Evict",                     {kNo, kNo, kNo, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Status",                    {kOwn, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Watch",                     {kOwn, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/DescribeEpoch",             {kOwn, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/Drain",                     {kNo, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Coordinator/ExplainPlan",               {kOwn, kOwn, kOwn, kYes, kNo}},
    {"/weightwire.v1.Communicators/JoinCommunicator",        {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Communicators/OfferUniqueId",           {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Communicators/AwaitUniqueId",           {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/weightwire.v1.Communicators/EndCommunicator",         {kOwn, kOwn, kOwn, kNo, kNo}},
    {"/grpc.health.v1.Health/Check",                         {kYes, kYes, kYes, kYes, kYes}},
    {"/grpc.health.v1.Health/Watch",                         {kYes, kYes, kYes, kYes, kYes}},
    {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                                                             {kNo, kNo, kNo, kYes, kNo}},
    // clang-format on
};

Right RightOf(const RightsRow* row, tls::Role role) {
  const auto column = std::find(std::begin(kColumns), std::end(kColumns), role);
  if (row == nullptr || column == std::end(kColumns)) return kNo;
  return row->rights[static_cast<size_t>(column - std::begin(kColumns))];
}

std::string WhoMay(const RightsRow* row) {
  std::string out;
  for (tls::Role role : kColumns) {
    const Right right = RightOf(row, role);
    if (right == kNo) continue;
    out += (out.empty() ? "" : ", ") + std::string(tls::RoleName(role)) +
           (right == kOwn ? " of the job" : "");
  }
  return out.empty() ? "nobody" : out;
}

}  // namespace

std::span<const RightsRow> RightsTable() { return kTable; }

const RightsRow* FindRights(std::string_view method) {
  for (const RightsRow& row : kTable) {
    if (row.method == method) return &row;
  }
  return nullptr;
}

Status CheckRight(std::string_view method, const tls::Identity& caller,
                  const tls::Identity& server) {
  const RightsRow* row = FindRights(method);
  const Right right = RightOf(row, caller.role);
  const bool domain = caller.domain == server.domain;
  const bool own = domain && caller.ns == server.ns && caller.job == server.job;
  if ((right == Right::kYes && domain) || (right == Right::kOwnJob && own)) return OkStatus();
  return Status(Code::kPermissionDenied, Reason::kPermissionDenied,
                caller.Uri() + " may not call " + std::string(method) + " of job " + server.job +
                    "; who may: " + WhoMay(row))
      .Remedy("use a certificate of such a role; docs/security.md has the table of rights");
}

}  // namespace weightwire::rpc
