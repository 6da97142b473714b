#include "server/rpc/owners.h"

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

Owners WithTrainer() {
  Owners owners;
  owners.Opened(kTrainer, "pod", kLife, kAgent);
  owners.Registered(kAgent, kMember);
  return owners;
}

TEST(Owners, OnlyWhoBroughtItMayNameIt) {
  const Owners owners = WithTrainer();
  EXPECT_TRUE(owners.Check(kTrainer, kAgent).ok());
  EXPECT_TRUE(owners.Check(kTrainer, kMember).ok());
  EXPECT_EQ(owners.Check(kEngine, kAgent).code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.Check(kEngine, kMember).code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.Check(Of(tls::Role::kTrainer, 1), kMember).code(), Code::kPermissionDenied);
}

TEST(Owners, AnAgentIsNotTakenOverByAnotherIdentity) {
  const Owners owners = WithTrainer();
  EXPECT_EQ(owners.CheckOpen(kEngine, kLife).code(), Code::kPermissionDenied);
  EXPECT_TRUE(owners.CheckOpen(kTrainer, kLife).ok());
  EXPECT_TRUE(owners.CheckOpen(kEngine, Incarnation(71)).ok());
}

TEST(Owners, ATokenIsBoundToTheAgentThatOpenedWithIt) {
  Owners owners;
  owners.Opened(kTrainer, "pod", kLife, kAgent, "token-a");
  const Status replayed = owners.CheckOpen(kTrainer, Incarnation(71), "token-a");
  EXPECT_EQ(replayed.code(), Code::kPermissionDenied);
  EXPECT_NE(replayed.message().find("in use by agent incarnation 70"), std::string::npos);
  EXPECT_TRUE(owners.CheckOpen(kTrainer, kLife, "token-a").ok()) << "it comes back";
  EXPECT_TRUE(owners.CheckOpen(kTrainer, Incarnation(71), "token-b").ok());
  EXPECT_TRUE(owners.CheckOpen(kTrainer, Incarnation(71)).ok()) << "a token for several ranks";
  owners.Ended(kAgent);
  EXPECT_TRUE(owners.CheckOpen(kTrainer, Incarnation(71), "token-a").ok());
}

TEST(Owners, ATokenIsRenewedUnderTheSameRule) {
  constexpr AgentId kSecond(8);
  Owners owners;
  owners.Opened(kTrainer, "pod", kLife, kAgent, "token-a");
  owners.Opened(kTrainer, "pod", Incarnation(71), kSecond, "token-b");
  EXPECT_EQ(owners.Renew(kTrainer, kAgent, "token-b").code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.Renew(kEngine, kAgent, "token-c").code(), Code::kPermissionDenied);
  EXPECT_TRUE(owners.Renew(kTrainer, kAgent, "token-c").ok());
  EXPECT_TRUE(owners.CheckOpen(kTrainer, Incarnation(72), "token-a").ok()) << "nobody's any more";
  EXPECT_FALSE(owners.CheckOpen(kTrainer, Incarnation(72), "token-c").ok());
}

TEST(Owners, WhatEndedIsNobodys) {
  Owners owners = WithTrainer();
  owners.Ended(kAgent);
  EXPECT_TRUE(owners.Check(kEngine, kAgent).ok());
  EXPECT_TRUE(owners.Check(kEngine, kMember).ok());
  EXPECT_TRUE(owners.CheckOpen(kEngine, kLife).ok());
}

TEST(Owners, ASessionThatReplacedAnotherOutlivesItsEnd) {
  Owners owners = WithTrainer();
  owners.Opened(kTrainer, "pod", kLife, AgentId(8));
  owners.Ended(kAgent);
  EXPECT_FALSE(owners.CheckOpen(kEngine, kLife).ok());
  EXPECT_FALSE(owners.Check(kEngine, AgentId(8)).ok());
}

TEST(Owners, APlaceThatAnotherLifeTookIsItsOwn) {
  Owners owners = WithTrainer();
  owners.Opened(kEngine, "pod", Incarnation(71), AgentId(8));
  const epoch::Member next{kMember.id, Incarnation(31)};
  owners.Registered(AgentId(8), next);
  EXPECT_TRUE(owners.Check(kEngine, next).ok());
  EXPECT_FALSE(owners.Check(kTrainer, next).ok());
}

TEST(Owners, WithoutTlsEverythingMayBeNamed) {
  const Owners owners = WithTrainer();
  EXPECT_TRUE(owners.Check(std::nullopt, kAgent).ok());
  EXPECT_TRUE(CheckPlace(std::nullopt, Place(control::GroupRole::kTrainer, 0)).ok());
}

TEST(Owners, ANameIsOfWhoBroughtAllAgentsOfThatName) {
  Owners owners = WithTrainer();
  EXPECT_TRUE(owners.CheckAgents(kTrainer, "pod").ok());
  EXPECT_EQ(owners.CheckAgents(kEngine, "pod").code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.CheckAgents(kEngine, "hub").code(), Code::kNotFound)
      << "perhaps one that proves nothing, in this process";
  owners.Opened(kEngine, "pod", Incarnation(71), AgentId(8));
  EXPECT_EQ(owners.CheckAgents(kTrainer, "pod").code(), Code::kPermissionDenied);
  EXPECT_EQ(owners.CheckAgents(kEngine, "pod").code(), Code::kPermissionDenied);
  owners.Ended(kAgent);
  EXPECT_TRUE(owners.CheckAgents(kEngine, "pod").ok());
  EXPECT_TRUE(owners.CheckAgents(std::nullopt, "hub").ok());
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
