#include "server/rpc/rights.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "weightwire/v1/communicator.pb.h"
#include "weightwire/v1/coordinator.pb.h"

namespace weightwire::rpc {
namespace {

constexpr tls::Role kRoles[] = {tls::Role::kTrainer, tls::Role::kEngine, tls::Role::kAgent,
                                tls::Role::kOperator, tls::Role::kMetrics};

tls::Identity Of(tls::Role role, const std::string& job = "rl") {
  return {"prod.example", "train", job, role, {}};
}

std::set<std::string> MethodsOf(const google::protobuf::FileDescriptor* file) {
  std::set<std::string> out;
  for (int i = 0; i < file->service_count(); ++i) {
    const auto* service = file->service(i);
    for (int j = 0; j < service->method_count(); ++j) {
      out.insert("/" + service->full_name() + "/" + service->method(j)->name());
    }
  }
  return out;
}

std::string DocumentedRows() {
  std::ifstream page(std::string(std::getenv("WEIGHTWIRE_SOURCE_DIR")) + "/docs/security.md");
  std::string rows;
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("| `/", 0) == 0) rows += line + "\n";
  }
  return rows;
}

TEST(Rights, EveryRpcOfTheProtosHasOneRow) {
  std::set<std::string> wanted = MethodsOf(v1::StatusRequest::descriptor()->file());
  wanted.merge(MethodsOf(v1::JoinCommunicatorRequest::descriptor()->file()));
  std::multiset<std::string> rows;
  for (const RightsRow& row : RightsTable()) {
    if (row.method.rfind("/weightwire.", 0) == 0) rows.emplace(row.method);
  }
  EXPECT_EQ(rows, std::multiset<std::string>(wanted.begin(), wanted.end()));
}

TEST(Rights, ThePageShowsTheTable) {
  std::ostringstream rows;
  for (const RightsRow& row : RightsTable()) {
    rows << "| `" << row.method << "` |";
    for (Right right : row.rights) {
      rows << " "
           << (right == Right::kNo    ? "no"
               : right == Right::kYes ? "yes"
                                      : "own job")
           << " |";
    }
    rows << "\n";
  }
  EXPECT_EQ(DocumentedRows(), rows.str()) << "docs/security.md";
}

TEST(Rights, EachCellDecidesItsRole) {
  for (const RightsRow& row : RightsTable()) {
    for (size_t i = 0; i < std::size(kRoles); ++i) {
      const Right right = row.rights[i];
      const Status own = CheckRight(row.method, Of(kRoles[i]), Of(tls::Role::kCoordinator));
      const Status other = CheckRight(row.method, Of(kRoles[i], "x"), Of(tls::Role::kCoordinator));
      EXPECT_EQ(own.ok(), right != Right::kNo) << row.method << ": " << own.ToString();
      EXPECT_EQ(other.ok(), right == Right::kYes) << row.method << ": " << other.ToString();
    }
  }
}

TEST(Rights, NamespaceAndTrustDomainCount) {
  const std::string status = "/weightwire.v1.Coordinator/Status";
  const tls::Identity server = Of(tls::Role::kCoordinator);
  tls::Identity engine = Of(tls::Role::kEngine), person = Of(tls::Role::kOperator);
  engine.ns = person.ns = "other";
  EXPECT_FALSE(CheckRight(status, engine, server).ok());
  EXPECT_TRUE(CheckRight(status, person, server).ok());
  person.domain = "elsewhere.example";
  EXPECT_FALSE(CheckRight(status, person, server).ok());
}

TEST(Rights, WhatHasNoRowIsRefusedToEverybody) {
  for (tls::Role role : kRoles) {
    const Status status =
        CheckRight("/weightwire.v1.Coordinator/New", Of(role), Of(tls::Role::kCoordinator));
    EXPECT_EQ(status.code(), Code::kPermissionDenied);
  }
  EXPECT_FALSE(CheckRight("/grpc.health.v1.Health/Check", Of(tls::Role::kCoordinator),
                          Of(tls::Role::kCoordinator))
                   .ok());
}

}  // namespace
}  // namespace weightwire::rpc
