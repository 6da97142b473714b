#include "server/rpc/acl.h"

#include <gtest/gtest.h>

namespace weightwire::rpc {
namespace {

Caller Of(tls::Role role, std::optional<uint32_t> rank = {}) {
  return tls::Identity{"prod.example", "train", "rl", role, rank};
}
const Caller kTrainer = Of(tls::Role::kTrainer);
const Caller kEngine = Of(tls::Role::kEngine);
constexpr AgentId kAgent(7);
constexpr Incarnation kLife(70);
const epoch::Member kMember{ParticipantId(3), Incarnation(30)};

control::RegisterRequest Place(control::GroupRole role, uint32_t rank) {
  control::RegisterRequest out;
  out.role = role;
  out.group = "group";
  out.rank = rank;
  return out;
}

Acl WithTrainer() {
  Acl acl;
  acl.Opened(kTrainer, "pod", kLife, kAgent);
  acl.Registered(kAgent, kMember);
  return acl;
}

TEST(Acl, OnlyWhoBroughtItMayNameIt) {
  const Acl acl = WithTrainer();
  EXPECT_TRUE(acl.Check(kTrainer, kAgent).ok());
  EXPECT_TRUE(acl.Check(kTrainer, kMember).ok());
  EXPECT_EQ(acl.Check(kEngine, kAgent).code(), Code::kPermissionDenied);
  EXPECT_EQ(acl.Check(kEngine, kMember).code(), Code::kPermissionDenied);
  EXPECT_EQ(acl.Check(Of(tls::Role::kTrainer, 1), kMember).code(), Code::kPermissionDenied);
}

TEST(Acl, AnAgentIsNotTakenOverByAnotherIdentity) {
  const Acl acl = WithTrainer();
  EXPECT_EQ(acl.CheckOpen(kEngine, kLife).code(), Code::kPermissionDenied);
  EXPECT_TRUE(acl.CheckOpen(kTrainer, kLife).ok());
  EXPECT_TRUE(acl.CheckOpen(kEngine, Incarnation(71)).ok());
}

TEST(Acl, ATokenIsBoundToTheAgentThatOpenedWithIt) {
  Acl acl;
  acl.Opened(kTrainer, "pod", kLife, kAgent, "token-a");
  const Status replayed = acl.CheckOpen(kTrainer, Incarnation(71), "token-a");
  EXPECT_EQ(replayed.code(), Code::kPermissionDenied);
  EXPECT_NE(replayed.message().find("in use by agent incarnation 70"), std::string::npos);
  EXPECT_TRUE(acl.CheckOpen(kTrainer, kLife, "token-a").ok()) << "it comes back";
  EXPECT_TRUE(acl.CheckOpen(kTrainer, Incarnation(71), "token-b").ok());
  EXPECT_TRUE(acl.CheckOpen(kTrainer, Incarnation(71)).ok()) << "a token for several ranks";
  acl.Ended(kAgent);
  EXPECT_TRUE(acl.CheckOpen(kTrainer, Incarnation(71), "token-a").ok());
}

TEST(Acl, ATokenIsRenewedUnderTheSameRule) {
  constexpr AgentId kSecond(8);
  Acl acl;
  acl.Opened(kTrainer, "pod", kLife, kAgent, "token-a");
  acl.Opened(kTrainer, "pod", Incarnation(71), kSecond, "token-b");
  EXPECT_EQ(acl.Renew(kTrainer, kAgent, "token-b").code(), Code::kPermissionDenied);
  EXPECT_EQ(acl.Renew(kEngine, kAgent, "token-c").code(), Code::kPermissionDenied);
  EXPECT_TRUE(acl.Renew(kTrainer, kAgent, "token-c").ok());
  EXPECT_TRUE(acl.CheckOpen(kTrainer, Incarnation(72), "token-a").ok()) << "nobody's any more";
  EXPECT_FALSE(acl.CheckOpen(kTrainer, Incarnation(72), "token-c").ok());
}

TEST(Acl, WhatEndedIsNobodys) {
  Acl acl = WithTrainer();
  acl.Ended(kAgent);
  EXPECT_TRUE(acl.Check(kEngine, kAgent).ok());
  EXPECT_TRUE(acl.Check(kEngine, kMember).ok());
  EXPECT_TRUE(acl.CheckOpen(kEngine, kLife).ok());
}

TEST(Acl, ASessionThatReplacedAnotherOutlivesItsEnd) {
  Acl acl = WithTrainer();
  acl.Opened(kTrainer, "pod", kLife, AgentId(8));
  acl.Ended(kAgent);
  EXPECT_FALSE(acl.CheckOpen(kEngine, kLife).ok());
  EXPECT_FALSE(acl.Check(kEngine, AgentId(8)).ok());
}

TEST(Acl, APlaceThatAnotherLifeTookIsItsOwn) {
  Acl acl = WithTrainer();
  acl.Opened(kEngine, "pod", Incarnation(71), AgentId(8));
  const epoch::Member next{kMember.id, Incarnation(31)};
  acl.Registered(AgentId(8), next);
  EXPECT_TRUE(acl.Check(kEngine, next).ok());
  EXPECT_FALSE(acl.Check(kTrainer, next).ok());
}

TEST(Acl, WithoutTlsEverythingMayBeNamed) {
  const Acl acl = WithTrainer();
  EXPECT_TRUE(acl.Check(std::nullopt, kAgent).ok());
  EXPECT_TRUE(CheckPlace(std::nullopt, Place(control::GroupRole::kTrainer, 0)).ok());
}

TEST(Acl, ANameIsOfWhoBroughtAllAgentsOfThatName) {
  Acl acl = WithTrainer();
  EXPECT_TRUE(acl.CheckAgents(kTrainer, "pod").ok());
  EXPECT_EQ(acl.CheckAgents(kEngine, "pod").code(), Code::kPermissionDenied);
  EXPECT_EQ(acl.CheckAgents(kEngine, "hub").code(), Code::kNotFound)
      << "perhaps one that proves nothing, in this process";
  acl.Opened(kEngine, "pod", Incarnation(71), AgentId(8));
  EXPECT_EQ(acl.CheckAgents(kTrainer, "pod").code(), Code::kPermissionDenied);
  EXPECT_EQ(acl.CheckAgents(kEngine, "pod").code(), Code::kPermissionDenied);
  acl.Ended(kAgent);
  EXPECT_TRUE(acl.CheckAgents(kEngine, "pod").ok());
  EXPECT_TRUE(acl.CheckAgents(std::nullopt, "hub").ok());
}

TEST(CheckPlace, ARoleTakesItsOwnSide) {
  using control::GroupRole;
  EXPECT_TRUE(CheckPlace(kTrainer, Place(GroupRole::kTrainer, 5)).ok());
  EXPECT_TRUE(CheckPlace(kEngine, Place(GroupRole::kEngine, 5)).ok());
  EXPECT_FALSE(CheckPlace(kTrainer, Place(GroupRole::kEngine, 5)).ok());
  EXPECT_FALSE(CheckPlace(kEngine, Place(GroupRole::kTrainer, 5)).ok());
  for (GroupRole role : {GroupRole::kTrainer, GroupRole::kEngine}) {
    EXPECT_TRUE(CheckPlace(Of(tls::Role::kAgent), Place(role, 5)).ok());
    EXPECT_FALSE(CheckPlace(Of(tls::Role::kOperator), Place(role, 5)).ok());
  }
}

TEST(CheckPlace, AnIdentityWithARankTakesThatRank) {
  using control::GroupRole;
  EXPECT_TRUE(CheckPlace(Of(tls::Role::kTrainer, 5), Place(GroupRole::kTrainer, 5)).ok());
  const Status other = CheckPlace(Of(tls::Role::kTrainer, 5), Place(GroupRole::kTrainer, 6));
  EXPECT_EQ(other.code(), Code::kPermissionDenied);
  EXPECT_EQ(other.rank(), "group/6");
}

}  // namespace
}  // namespace weightwire::rpc
